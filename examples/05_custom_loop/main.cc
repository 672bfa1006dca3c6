// A handwritten training loop with the components of the Trainer: checkpoints, loggers, a progress bar, metrics and a
// report. Each component can be used without the others. Trains on nine tenths of the test images of MNIST (t10k-*) and
// validates on the rest. A run that was stopped or killed resumes from its newest checkpoint when the same command is
// run again. After `make build`, run it from the root of the repository:
//   build/release/bin/lockstep run -n 2 build/release/bin/05_custom_loop --data mnist --folder runs/digits
#include <lockstep/data/datasets/mnist.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/loggers/logger_collection.h>
#include <lockstep/train/metrics/gather_records.h>
#include <lockstep/train/metrics/metrics.h>
#include <lockstep/train/report/progress_bar.h>
#include <lockstep/train/report/report.h>
#include <torch/torch.h>

#include "examples/arguments.h"

namespace {

namespace training = lockstep::training;

double accuracy(torch::nn::Sequential& net, const lockstep::data::Mnist& images, lockstep::Group& world) {
  const torch::NoGradGuard no_grad;
  training::Metrics metrics;
  auto loader = lockstep::data::make_loader(
      images, world, {.batch_size = 250, .shuffle = false, .mode = lockstep::data::ShardMode::kExact});
  for (auto& batch : loader.epoch(0))
    metrics.add("accuracy", net->forward(batch.data).argmax(1).eq(batch.target).to(torch::kFloat).mean(),
                static_cast<double>(batch.target.size(0)));
  return training::mean_over_ranks(metrics, world).front().second;
}

struct Options {
  std::string data, folder = "runs/digits";
  std::int64_t epochs = 3, batch_size = 64, save_every = 100;
};

int train(const Options& options) {
  const auto& [data, folder, epochs, batch_size, save_every] = options;
  lockstep::Group world = lockstep::init();
  const lockstep::data::Mnist images = lockstep::data::Mnist::load(data, lockstep::data::Mnist::Mode::kTest);
  const std::size_t num_train = images.size() - images.size() / 10;
  const lockstep::data::Mnist validation = images.slice(num_train, images.size() - num_train);

  // docs: begin loop
  lockstep::seed_everything(1);
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 256), torch::nn::GELU(),
                            torch::nn::Dropout(0.1), torch::nn::Linear(256, 10), torch::nn::LogSoftmax(1));
  lockstep::TrainingState state(world, folder + "/checkpoints", {.settings = {{"batch_size", batch_size}}});
  if (state.is_finished()) return 0;  // an earlier start has completed the training
  lockstep::DistributedDataParallel ddp(net, world, {.bucket_layout = state.bucket_layout("ddp")});
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-3});
  auto loader = lockstep::data::make_loader(images.slice(0, num_train), world, {.batch_size = batch_size, .seed = 1});
  const auto steps_per_epoch = static_cast<std::int64_t>(loader.batches_per_epoch());
  lockstep::optim::Scheduler schedule(optimizer, lockstep::optim::cosine_decay({.steps = epochs * steps_per_epoch}));
  state.add("model", net).add("ddp", ddp).add("optimizer", optimizer).add("schedule", schedule).add("loader", loader);
  lockstep::seed_everything(1 + static_cast<std::uint64_t>(world.rank()));  // different dropout on each rank
  state.add_random_state().resume();
  std::int64_t step = state.step();

  training::LoggerCollection loggers(world.rank(), {.directory = folder, .first_step = step + 1});
  const training::CurveLogger& curves = loggers.add(std::make_unique<training::CurveLogger>());
  training::ProgressBar progress(world.rank(), {.num_epochs = epochs,
                                                .steps_per_epoch = steps_per_epoch,
                                                .steps_done = step,
                                                .samples_per_step = batch_size * world.size()});
  training::RankRecorder recorder({.rank = world.rank()});
  training::PhaseTimer timer;
  training::Metrics metrics;
  for (const std::uint64_t epoch : loader.remaining_epochs(static_cast<std::uint64_t>(epochs))) {
    timer.begin_step();  // do not count time before the epoch
    for (auto& batch : loader.epoch(epoch)) {
      optimizer.zero_grad();
      const torch::Tensor loss = torch::nll_loss(net->forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      schedule.step();
      recorder.add(++step, timer.end_step());
      metrics.add("train/loss", loss.detach(), static_cast<double>(batch.target.size(0)));
      progress.step([&] { return training::NamedValues{{"loss", loss.item<double>()}}; });
      if (step % 20 == 0) loggers.log_scalars(step, training::mean_over_ranks(std::exchange(metrics, {}), world));
      const bool stop = world.stop_requested();  // the same on all ranks
      if (stop || step % save_every == 0) state.save_async(step);
      if (stop) return lockstep::kPreemptedExitCode;  // the destructor of `state` waits for the save
    }
    net->eval();
    loggers.log_scalars(step, {{"val/accuracy", accuracy(net, validation, world)}});
    net->train();
  }
  state.save(step, {.finished = true});
  const auto records = training::gather_records(world, recorder.record());  // all ranks call it
  if (world.rank() == 0)
    training::write_report(folder + "/report.html", {.title = "digits", .curves = curves.curves(), .ranks = records});
  // docs: end loop
  return 0;
}

int run(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains a small network on handwritten digits, in a loop that resumes.");
  arguments.text("--data", options.data, "directory with the MNIST files, compressed (.gz) or not");
  arguments.text("--folder", options.folder, "directory for checkpoints, metrics and a report");
  arguments.integer("--epochs", options.epochs, 1, 1000, "passes over the training images");
  arguments.integer("--batch-size", options.batch_size, 1, 100000, "images per step and rank");
  arguments.integer("--save-every", options.save_every, 1, 1000000, "steps between two checkpoints");
  arguments.parse(argc, argv);
  return train(options);
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
