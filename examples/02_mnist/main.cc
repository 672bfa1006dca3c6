// Trains a small convolutional network on handwritten digits: DistributedDataParallel with an optimizer of libtorch, in
// a handwritten loop, and an evaluation that all ranks share. --batch-size is the total over all ranks, so the result
// does not depend on the number of ranks. After `make build`, run it from the root of the repository:
//   build/release/bin/lockstep run -n 2 build/release/bin/02_mnist --data mnist
// The directory `mnist` contains the files of MNIST (train-images-idx3-ubyte.gz, ...); --help lists all options.
#include <lockstep/data/datasets/mnist.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/report/progress_bar.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>

#include "examples/arguments.h"

namespace {

using lockstep::data::Mnist;

struct Options {
  std::string data;
  std::int64_t epochs = 5;
  std::int64_t batch_size = 64;
  double lr = 0.05;
  std::int64_t seed = 1;
  std::string weights;
  std::string save;
  std::string loss_log;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains a convolutional network on handwritten digits.");
  arguments.text("--data", options.data, "directory with the MNIST files, compressed (.gz) or not");
  arguments.integer("--epochs", options.epochs, 1, 1000, "passes over the training images");
  arguments.integer("--batch-size", options.batch_size, 1, 100000, "images per step, over all ranks");
  arguments.number("--lr", options.lr, 1e-6, 10,
                   "maximum learning rate, after a warm-up and before a linear decay to 0");
  arguments.integer("--seed", options.seed, 0, 1000000000,
                    "seed of the initial weights and of the order of the images");
  arguments.text("--weights", options.weights, "start with the weights in this file (safetensors)");
  arguments.text("--save", options.save, "write the trained network to this file (safetensors)");
  arguments.text("--loss-log", options.loss_log, "write the mean loss of each step to this file, one per line");
  arguments.parse(argc, argv);
  if (options.data.empty())
    throw lockstep::UsageError("--data is missing; expected a directory with the MNIST files, such as --data mnist");
  return options;
}

struct Images {
  Mnist train;
  Mnist validation;
};

// Reads the training images, and the test images for validation. If `folder` has only the test images, trains on nine
// tenths of them and validates on the last tenth.
Images load_images(const std::string& folder) {
  const Mnist test = Mnist::load(folder, Mnist::Mode::kTest);
  if (Mnist::exists(folder, Mnist::Mode::kTrain)) return {Mnist::load(folder, Mnist::Mode::kTrain), test};
  const std::size_t num_validation = std::max<std::size_t>(1, test.size() / 10);
  return {test.slice(0, test.size() - num_validation), test.slice(test.size() - num_validation, num_validation)};
}

void check_loss_log(const std::ostream& loss_log, const Options& options) {
  if (!loss_log)
    throw lockstep::UsageError("--loss-log is \"" + options.loss_log +
                               "\", which cannot be written; expected a writable file");
}

// docs: begin model
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)));
    hidden = register_module("hidden", torch::nn::Linear(32 * 7 * 7, 128));
    digits = register_module("digits", torch::nn::Linear(128, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = (x - 0.1307) / 0.3081;
    x = torch::avg_pool2d(torch::gelu(conv1(x)), 2);
    x = torch::avg_pool2d(torch::gelu(conv2(x)), 2);
    return torch::log_softmax(digits(torch::gelu(hidden(x.flatten(1)))), 1);
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear hidden{nullptr}, digits{nullptr};
};
TORCH_MODULE(Net);
// docs: end model

// docs: begin evaluate
struct Score {
  double loss;
  double accuracy;
};

// Returns the score over all images. Each rank evaluates its part of them, and each image is evaluated exactly once.
// Collective.
Score evaluate(Net& net, const Mnist& images, const lockstep::Group& world) {
  const torch::NoGradGuard no_grad;
  auto loader = lockstep::data::make_loader(
      images, world, {.batch_size = 250, .shuffle = false, .mode = lockstep::data::ShardMode::kExact});
  const torch::Tensor sums = torch::zeros({2}, torch::kFloat64);
  for (auto& batch : loader.epoch(0)) {
    const torch::Tensor output = net->forward(batch.data);
    sums[0] += torch::nll_loss(output, batch.target, {}, at::Reduction::Sum);
    sums[1] += output.argmax(1).eq(batch.target).sum();
  }
  world.all_reduce(sums);
  const auto count = static_cast<double>(images.size());
  return {sums[0].item<double>() / count, sums[1].item<double>() / count};
}
// docs: end evaluate

void train(const Options& options) {
  lockstep::Group world = lockstep::init();
  if (options.batch_size % world.size() != 0)
    throw lockstep::UsageError("--batch-size is \"" + std::to_string(options.batch_size) +
                               "\"; expected a multiple of the number of ranks, " + std::to_string(world.size()));
  std::ofstream loss_log;
  if (world.rank() == 0) {
    examples::require_writable_path("--save", options.save);
    examples::require_writable_path("--loss-log", options.loss_log);
    if (!options.loss_log.empty()) loss_log.open(options.loss_log);
    check_loss_log(loss_log, options);
    loss_log.precision(17);
  }
  const Images images = load_images(options.data);

  // docs: begin training
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed));
  Net net;
  if (!options.weights.empty()) lockstep::load(net, options.weights);
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9));
  auto loader = lockstep::data::make_loader(
      images.train, world,
      {.batch_size = options.batch_size / world.size(), .seed = static_cast<std::uint64_t>(options.seed)});
  const auto steps_per_epoch = static_cast<std::int64_t>(loader.batches_per_epoch());
  const std::int64_t num_steps = options.epochs * steps_per_epoch;
  std::int64_t step = 0;
  lockstep::training::ProgressBar progress(
      world.rank(),
      {.num_epochs = options.epochs, .steps_per_epoch = steps_per_epoch, .samples_per_step = options.batch_size});
  for (std::int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    for (auto& batch : loader) {
      const double done = static_cast<double>(++step) /
                          static_cast<double>(num_steps);  // warm-up for a tenth of the steps, then linear decay
      for (auto& group : optimizer.param_groups()) group.options().set_lr(options.lr * std::min(10 * done, 1 - done));
      optimizer.zero_grad();
      const torch::Tensor output = net->forward(batch.data);
      torch::Tensor loss = torch::nll_loss(output, batch.target);
      loss.backward();
      optimizer.step();

      // This all_reduce is only for the progress line: backward() has already averaged the gradients.
      const torch::Tensor metrics =
          torch::stack({loss.detach(), output.argmax(1).eq(batch.target).to(torch::kFloat).mean()});
      world.all_reduce(metrics, lockstep::ReduceOp::kMean);
      if (loss_log.is_open()) loss_log << metrics[0].item<double>() << '\n';
      progress.step({{"loss", metrics[0].item<double>()}, {"acc", metrics[1].item<double>()}});
    }
    const Score score = evaluate(net, images.validation, world);
    if (world.rank() == 0)
      std::printf("epoch %lld: validation loss %.4f, accuracy %.2f %%\n", static_cast<long long>(epoch + 1), score.loss,
                  100 * score.accuracy);
  }
  if (world.rank() == 0 && !options.save.empty()) lockstep::save(net, options.save);
  // docs: end training
  check_loss_log(loss_log.flush(), options);
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    train(read_options(count, words));
    return 0;
  });
}
