// Trains a generator and a discriminator of images against each other (DCGAN: Radford et al., 2015): two models, two
// fused optimizers, batch norm, and samples as a PNG file after each epoch. After `make build`, run it from the root of
// the repository:
//   build/release/bin/lockstep run -n 2 build/release/bin/06_dcgan --data mnist --samples samples.png
// The directory `mnist` contains the files of MNIST or Fashion-MNIST; --help lists all options.
#include <lockstep/data/datasets/mnist.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/metrics/metrics.h>
#include <lockstep/train/metrics/tensor_conversion.h>
#include <lockstep/train/report/progress_bar.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>

#include "examples/arguments.h"

namespace {

using lockstep::data::Mnist;
namespace nn = torch::nn;

struct Options {
  std::string data, samples = "samples.png";
  std::int64_t epochs = 20, batch_size = 128, noise = 64, width = 32, seed = 1;
  double lr = 2e-4;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains a generator and a discriminator of small images (DCGAN).");
  arguments.text("--data", options.data, "directory with the MNIST files, compressed (.gz) or not");
  arguments.text("--samples", options.samples, "PNG file with 64 images, written after each epoch");
  arguments.integer("--epochs", options.epochs, 1, 100000, "passes over the images");
  arguments.integer("--batch-size", options.batch_size, 1, 100000, "images per step, over all ranks");
  arguments.integer("--noise", options.noise, 1, 10000, "numbers from which the generator makes an image");
  arguments.integer("--width", options.width, 1, 1024, "channels of the largest layers");
  arguments.number("--lr", options.lr, 1e-6, 1, "learning rate of both models");
  arguments.integer("--seed", options.seed, 0, 1000000000, "seed of weights, noise and the order of the images");
  arguments.parse(argc, argv);
  if (options.data.empty())
    throw lockstep::UsageError("--data is missing; expected a directory with the MNIST files, such as --data mnist");
  examples::require_writable_path("--samples", options.samples);
  return options;
}

// docs: begin models
nn::ConvTranspose2d enlarge(std::int64_t from, std::int64_t to, std::int64_t kernel, std::int64_t stride) {
  const std::int64_t padding = stride > 1 ? 1 : 0;
  return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(from, to, kernel).stride(stride).padding(padding).bias(false));
}
nn::Conv2d shrink(std::int64_t from, std::int64_t to) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, 4).stride(2).padding(1).bias(false));
}
nn::LeakyReLU leaky() { return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)); }

/// [n, noise, 1, 1] to images [n, 1, 28, 28] from -1 to 1.
nn::Sequential make_generator(std::int64_t noise, std::int64_t width) {
  return nn::Sequential(enlarge(noise, 2 * width, 7, 1), nn::BatchNorm2d(2 * width), nn::ReLU(),
                        enlarge(2 * width, width, 4, 2), nn::BatchNorm2d(width), nn::ReLU(), enlarge(width, 1, 4, 2),
                        nn::Tanh());
}
/// Images to a number each: above 0 for real ones.
nn::Sequential make_discriminator(std::int64_t width) {
  return nn::Sequential(shrink(1, width), leaky(), shrink(width, 2 * width), nn::BatchNorm2d(2 * width), leaky(),
                        nn::Flatten(), nn::Linear(2 * width * 7 * 7, 1));
}
void initialize(nn::Module& model) {
  for (const auto& named : model.named_parameters())
    if (named.value().dim() > 1) nn::init::normal_(named.value(), 0, 0.02);
}
// docs: end models

torch::Tensor loss_for(const torch::Tensor& output, bool real) {
  return torch::binary_cross_entropy_with_logits(output, real ? torch::ones_like(output) : torch::zeros_like(output));
}

/// Writes images [64, 1, 28, 28] from -1 to 1 as a square of 8 x 8.
void write_samples(const std::string& path, const torch::Tensor& images) {
  const torch::Tensor square = ((images + 1) / 2).view({8, 8, 28, 28}).permute({0, 2, 1, 3}).reshape({8 * 28, 8 * 28});
  const std::string png = lockstep::training::encode_png(lockstep::training::make_image(square));
  std::ofstream(path, std::ios::binary) << png;
}

int run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  lockstep::Group world = lockstep::init();
  if (options.batch_size % world.size() != 0)
    throw lockstep::UsageError("--batch-size is \"" + std::to_string(options.batch_size) +
                               "\"; expected a multiple of the number of ranks, " + std::to_string(world.size()));
  const Mnist images = Mnist::load(
      options.data, Mnist::exists(options.data, Mnist::Mode::kTrain) ? Mnist::Mode::kTrain : Mnist::Mode::kTest);

  // docs: begin training
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed));
  nn::Sequential generator = make_generator(options.noise, options.width);
  nn::Sequential discriminator = make_discriminator(options.width);
  initialize(*generator);
  initialize(*discriminator);
  const torch::Tensor fixed_noise = torch::randn({64, options.noise, 1, 1}, world.device());
  generator->to(world.device());
  discriminator->to(world.device());
  lockstep::DistributedDataParallel ddp_g(generator, world), ddp_d(discriminator, world);
  lockstep::optim::Adam optimizer_g(ddp_g, {.lr = options.lr, .betas = {0.5, 0.999}});
  lockstep::optim::Adam optimizer_d(ddp_d, {.lr = options.lr, .betas = {0.5, 0.999}});
  auto loader = lockstep::data::make_loader(
      images, world,
      {.batch_size = options.batch_size / world.size(), .seed = static_cast<std::uint64_t>(options.seed)});
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed + 1 + world.rank()));  // other noise on each rank

  lockstep::training::ProgressBar progress(world.rank(),
                                           {.num_epochs = options.epochs,
                                            .steps_per_epoch = static_cast<std::int64_t>(loader.batches_per_epoch()),
                                            .samples_per_step = options.batch_size,
                                            .comm = world.size() > 1 && world.device().is_cpu()});
  for (std::uint64_t epoch = 0; epoch < static_cast<std::uint64_t>(options.epochs); ++epoch) {
    lockstep::training::Metrics metrics;
    for (auto& batch : loader.epoch(epoch)) {
      const torch::Tensor real = batch.data.to(world.device()) * 2 - 1;
      const torch::Tensor fake = generator->forward(torch::randn({real.size(0), options.noise, 1, 1}, real.options()));

      optimizer_d.zero_grad();
      const torch::Tensor loss_d =
          loss_for(discriminator->forward(real), true) + loss_for(discriminator->forward(fake.detach()), false);
      loss_d.backward();
      optimizer_d.step();

      optimizer_g.zero_grad();
      for (auto& weight : discriminator->parameters()) weight.requires_grad_(false);  // only the generator learns
      const torch::Tensor loss_g = loss_for(discriminator->forward(fake), true);
      loss_g.backward();
      optimizer_g.step();
      for (auto& weight : discriminator->parameters()) weight.requires_grad_(true);

      metrics.add("discriminator", loss_d.detach());
      metrics.add("generator", loss_g.detach());
      progress.step([&] {
        return lockstep::training::NamedValues{{"loss_d", loss_d.item<double>()}, {"loss_g", loss_g.item<double>()}};
      });
    }
    const auto means = lockstep::training::mean_over_ranks(metrics, world);  // all ranks call it
    if (world.rank() != 0) continue;
    char line[100];
    std::snprintf(line, sizeof line, "epoch %d: loss of the discriminator %.3f, of the generator %.3f",
                  static_cast<int>(epoch + 1), means[0].second, means[1].second);
    progress.print_line(line);
    const torch::NoGradGuard no_grad;
    generator->eval();  // rank 0 computes with its running statistics: the other ranks need not take part
    write_samples(options.samples, generator->forward(fixed_noise));
    generator->train();
  }
  // docs: end training
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
