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
#include <lockstep/train/report/curve_logger.h>
#include <lockstep/train/report/progress_bar.h>
#include <lockstep/train/report/report.h>
#include <lockstep/train/report/throughput.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <optional>

#include "examples/arguments.h"

namespace {

using lockstep::data::Mnist;
namespace checkpoint = lockstep::checkpoint;
namespace training = lockstep::training;

struct Options {
  std::string data;
  std::string folder = "runs/digits";
  std::int64_t epochs = 3;
  std::int64_t batch_size = 64;
  double lr = 1e-3;
  std::int64_t save_every = 100;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments(
      "Trains a small network on handwritten digits, in a custom loop that resumes after it was stopped.");
  arguments.text("--data", options.data, "directory with the MNIST files, compressed (.gz) or not");
  arguments.text("--folder", options.folder,
                 "directory for checkpoints, metrics and a report; resumes from a checkpoint in it");
  arguments.integer("--epochs", options.epochs, 1, 1000, "passes over the training images");
  arguments.integer("--batch-size", options.batch_size, 1, 100000, "images per step, over all ranks");
  arguments.number("--lr", options.lr, 1e-6, 10, "maximum learning rate");
  arguments.integer("--save-every", options.save_every, 1, 1000000, "steps between two checkpoints");
  arguments.parse(argc, argv);
  if (options.data.empty())
    throw lockstep::UsageError("--data is missing; expected a directory with the MNIST files, such as --data mnist");
  return options;
}

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(784, 256), torch::nn::GELU(),
                               torch::nn::Linear(256, 10), torch::nn::LogSoftmax(1));
}

double accuracy(torch::nn::Sequential& net, const Mnist& images, const lockstep::Group& world) {
  const torch::NoGradGuard no_grad;
  auto loader = lockstep::data::make_loader(
      images, world, {.batch_size = 250, .shuffle = false, .mode = lockstep::data::ShardMode::kExact});
  training::Metrics metrics;
  for (auto& batch : loader.epoch(0))
    metrics.add("accuracy", net->forward(batch.data).argmax(1).eq(batch.target).to(torch::kFloat).mean(),
                static_cast<double>(batch.target.size(0)));
  return training::mean_over_ranks(metrics, world).front().second;
}

// docs: begin watch
/// The progress bar, loggers and report. All ranks call its methods; only rank 0 writes.
struct TrainingMonitor {
  TrainingMonitor(const lockstep::Group& group, const Options& options, std::int64_t steps_per_epoch,
                  std::int64_t steps_done)
      : world(group),
        batch_size(options.batch_size),
        loggers(world.rank(), {.directory = options.folder,
                               .first_step = steps_done > 0 ? std::optional(steps_done + 1) : std::nullopt}),
        progress(world.rank(), {.num_epochs = options.epochs,
                                .steps_per_epoch = steps_per_epoch,
                                .steps_done = steps_done,
                                .samples_per_step = options.batch_size}) {
    auto logger = std::make_unique<training::CurveLogger>();
    curves = logger.get();
    loggers.add(std::move(logger));
  }
  void step(std::int64_t step, const torch::Tensor& loss, std::int64_t samples_drawn) {
    const training::StepTimes& times = timer.end_step();
    metrics.add("train/loss", loss, static_cast<double>(samples_drawn));
    throughput.add(times, batch_size);
    recorder.add(step, times);
    progress.step([&] { return training::NamedValues{{"loss", loss.item<double>()}}; });
    if (step % 20 != 0) return;
    training::NamedValues values = training::mean_over_ranks(metrics, world);  // all ranks call it
    metrics.clear();
    for (const auto& rate : throughput.values()) values.push_back(rate);
    loggers.log_scalars(step, values);
  }
  void report(const std::string& path) {
    const auto records = training::gather_records(world, recorder.record());  // all ranks call it
    if (world.rank() == 0)
      training::write_report(path, {.title = "digits",
                                    .facts = {{"ranks", std::to_string(world.size())}},
                                    .curves = curves->curves(),
                                    .ranks = records});
  }

  const lockstep::Group& world;
  std::int64_t batch_size;
  training::LoggerCollection loggers;
  const training::CurveLogger* curves = nullptr;  // owned by loggers
  training::ProgressBar progress;
  training::Throughput throughput{{}};
  training::RankRecorder recorder{{.rank = world.rank()}};
  training::PhaseTimer timer;
  training::Metrics metrics;
};
// docs: end watch

// docs: begin training
struct Training {
  Training(const lockstep::Group& group, const Options& options, const Mnist& images)
      : world(group),
        checkpoints(world, options.folder + "/checkpoints"),
        found(checkpoints.latest()),
        net(initial_model()),
        ddp(net, world),
        optimizer(ddp, {.lr = options.lr}),
        loader(
            lockstep::data::make_loader(images, world, {.batch_size = options.batch_size / world.size(), .seed = 1})),
        steps_per_epoch(static_cast<std::int64_t>(loader.batches_per_epoch())),
        schedule(optimizer, lockstep::optim::cosine_decay({.steps = options.epochs * steps_per_epoch})) {
    if (!found) return;
    const auto loop = found->read("loop");
    step = checkpoint::value_of<std::int64_t>(loop, "step");
    std::vector<std::pair<std::string, torch::Tensor>> optimizer_state;
    for (const auto& [name, value] : found->read("optimizer"))
      optimizer_state.emplace_back(name, std::get<torch::Tensor>(value));
    optimizer.load_state_dict(optimizer_state);
    schedule.resume({.step = checkpoint::value_of<std::int64_t>(loop, "rates_moved"), .base_lrs = {options.lr}});
    const auto position = lockstep::data::parse_position(checkpoint::value_of<std::string>(loop, "position"));
    epoch = position.epoch;
    if (position.samples_drawn < position.num_samples)
      loader.restore(position);
    else
      ++epoch;  // the epoch was finished
  }
  /// Loads the weights before DistributedDataParallel shares them between ranks.
  torch::nn::Sequential initial_model() const {
    lockstep::seed_everything(1);
    auto model = make_net();
    if (found) lockstep::load(model, found->path() + "/model.safetensors");
    return model;
  }
  torch::Tensor train_step(const lockstep::data::Example& batch, training::PhaseTimer& timer) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const auto scope = timer.enter(training::Phase::kForward);
      loss = torch::nll_loss(net->forward(batch.data), batch.target);
    }
    {
      const auto scope = timer.enter(training::Phase::kBackward);
      loss.backward();
    }
    const auto scope = timer.enter(training::Phase::kOptimizer);
    optimizer.step();
    schedule.step();
    ++step;
    return loss.detach();
  }
  /// Returns the parts of a checkpoint on rank 0, and nothing on other ranks. It omits the random number generators,
  /// because this training draws no random numbers. Collective.
  checkpoint::CheckpointParts checkpoint_parts() {
    checkpoint::CheckpointParts parts;
    const auto optimizer_state = optimizer.state_dict();  // all ranks call it
    if (world.rank() != 0) return parts;
    for (const auto& item : net->named_parameters()) parts["model"][item.key()] = item.value().detach();
    for (const auto& [name, tensor] : optimizer_state) parts["optimizer"][name] = tensor;
    parts["loop"] = {{"step", step},
                     {"rates_moved", schedule.position().step},
                     {"position", lockstep::data::to_text(loader.position())}};
    return parts;
  }

  const lockstep::Group& world;
  checkpoint::Checkpointer checkpoints;
  std::optional<checkpoint::SavedCheckpoint> found;
  torch::nn::Sequential net;
  lockstep::DistributedDataParallel ddp;
  lockstep::optim::AdamW optimizer;
  lockstep::data::Loader<lockstep::data::Example> loader;
  std::int64_t steps_per_epoch;
  lockstep::optim::Scheduler schedule;
  std::int64_t step = 0;
  std::uint64_t epoch = 0;
};
// docs: end training

int run(const Options& options) {
  lockstep::Group world = lockstep::init();
  if (options.batch_size % world.size() != 0)
    throw lockstep::UsageError("--batch-size is \"" + std::to_string(options.batch_size) +
                               "\"; expected a multiple of the number of ranks, " + std::to_string(world.size()));
  const Mnist images = Mnist::load(options.data, Mnist::Mode::kTest);
  const std::size_t num_validation = images.size() / 10;

  // docs: begin loop
  Training training(world, options, images.slice(0, images.size() - num_validation));
  TrainingMonitor monitor(world, options, training.steps_per_epoch, training.step);
  for (; training.epoch < static_cast<std::uint64_t>(options.epochs); ++training.epoch) {
    monitor.timer.begin_step();  // do not count time before the epoch
    for (auto& batch : training.loader.epoch(training.epoch)) {
      const torch::Tensor loss = training.train_step(batch, monitor.timer);
      monitor.step(training.step, loss, batch.target.size(0));
      const bool stop = world.stop_requested();  // the same on all ranks
      if (stop || training.step % options.save_every == 0)
        training.checkpoints.save_async(training.step, training.checkpoint_parts());
      if (!stop) continue;
      training.checkpoints.wait();  // bounded: by the disk
      return lockstep::kPreemptedExitCode;
    }
    const double val_accuracy =
        accuracy(training.net, images.slice(images.size() - num_validation, num_validation), world);
    monitor.loggers.log_scalars(training.step, {{"val/accuracy", val_accuracy}});
    char text[64];
    std::snprintf(text, sizeof text, "epoch %d: accuracy %.2f %%", static_cast<int>(training.epoch + 1),
                  100 * val_accuracy);
    monitor.progress.print_line(text);
  }
  training.checkpoints.save(training.step, training.checkpoint_parts());
  monitor.report(options.folder + "/report.html");
  // docs: end loop
  return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(read_options(argc, argv)); } catch (const lockstep::Error& error) {
  std::cerr << "05_custom_loop: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
