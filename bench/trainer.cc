// Measures the overhead of fit(): the same model in a plain loop and in the Trainer, with its progress bar, loggers and
// report, in turns in one process.
//   bench_trainer STEPS WIDTH FOLDER
// One rank; alternating blocks of 20 steps. The Trainer is compared with the mean of two plain loops, one created
// before its model and one after it, because the location of a model in memory changes a step by up to 1 %. The last
// line is "plain_ms=P trainer_ms=T added=RATIO plain_apart=RATIO": medians over the blocks, the median ratio of a
// Trainer block to its adjacent plain blocks minus 1, and the difference between the two plain loops, which is the
// measurement error.
#include <lockstep/base/parse.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using lockstep::data::Example;
namespace training = lockstep::training;

constexpr std::int64_t kFeatures = 256, kClasses = 10, kBatch = 64, kSamples = 64 * 100000, kWarm = 100, kBlock = 20;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width)
      : first(register_module("first", torch::nn::Linear(kFeatures, width))),
        second(register_module("second", torch::nn::Linear(width, width))),
        last(register_module("last", torch::nn::Linear(width, kClasses))) {}
  torch::Tensor loss(const Example& batch) {
    return torch::cross_entropy_loss(last(torch::relu(second(torch::relu(first(batch.data))))), batch.target);
  }
  torch::Tensor training_step(Example& batch, training::StepLog&) { return loss(batch); }
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup& setup) {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.01))}};
  }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(Net);

/// A loader that repeats one batch, so that no step waits for data.
auto make_loader(const lockstep::Group& world) {
  torch::manual_seed(3);
  struct RepeatedBatch {
    Example batch;
    Example get_batch(const std::vector<std::size_t>&) { return batch; }
    std::size_t size() const { return kSamples; }
  };
  return lockstep::data::make_loader(
      RepeatedBatch{{torch::randn({kBatch, kFeatures}), torch::randint(kClasses, {kBatch})}}, world,
      {.batch_size = kBatch});
}

/// A plain training loop, run in blocks of steps.
class PlainLoop {
 public:
  PlainLoop(const lockstep::Group& world, std::int64_t width)
      : net_(make_initial_net(width)),
        ddp_(net_, world),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)),
        loader_(make_loader(world)),
        epoch_(loader_.epoch(0)),
        iterator_(epoch_.begin()) {}
  void run(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i, ++iterator_) {
      optimizer_.zero_grad();
      net_->loss(*iterator_).backward();
      optimizer_.step();
    }
  }
  static Net make_initial_net(std::int64_t width) {
    torch::manual_seed(1);
    return Net(width);
  }

 private:
  Net net_;
  lockstep::DistributedDataParallel ddp_;
  torch::optim::SGD optimizer_;
  lockstep::data::Loader<Example> loader_;
  lockstep::data::Epoch<Example> epoch_;
  lockstep::data::LoaderIterator<Example> iterator_;
};

double ms_each(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count() / static_cast<double>(kBlock);
}

/// Runs a block of each plain loop after each block of the Trainer's steps.
struct InterleavedLoops : training::Callback {
  InterleavedLoops(PlainLoop& first, PlainLoop& second) : before(first), after(second) {}
  void on_step(training::FitContext& fit) override {
    if (fit.step() % kBlock != 0) return;
    const auto now = Clock::now();
    before.run(kBlock);
    const auto between = Clock::now();
    after.run(kBlock);
    const auto end = Clock::now();
    if (fit.step() > kWarm) {
      trainer_ms.push_back(ms_each(now - begin));
      before_ms.push_back(ms_each(between - now));
      after_ms.push_back(ms_each(end - between));
    }
    begin = end;
  }
  PlainLoop &before, &after;
  Clock::time_point begin;
  std::vector<double> trainer_ms, before_ms, after_ms;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) throw lockstep::UsageError("usage: bench_trainer STEPS WIDTH FOLDER");
  const auto steps = lockstep::base::parse_int_in_range("STEPS", argv[1], kWarm + 2 * kBlock, kSamples / kBatch),
             width = lockstep::base::parse_int_in_range("WIDTH", argv[2], 1, 100000);
  lockstep::Trainer trainer({.devices = 1, .max_steps = steps, .folder = argv[3]});
  PlainLoop before(trainer.world(), width);
  Net net = PlainLoop::make_initial_net(width);
  PlainLoop after(trainer.world(), width);
  const auto interleaved = std::make_shared<InterleavedLoops>(before, after);
  trainer.add(interleaved);
  trainer.fit(net, make_loader(trainer.world()));
  std::vector<double> plain, added, apart;
  for (std::size_t i = 0; i < interleaved->trainer_ms.size(); ++i) {
    plain.push_back((interleaved->before_ms[i] + interleaved->after_ms[i]) / 2);
    added.push_back(interleaved->trainer_ms[i] / plain.back());
    apart.push_back(interleaved->after_ms[i] / interleaved->before_ms[i]);
  }
  std::printf("plain_ms=%.4f trainer_ms=%.4f added=%.5f plain_apart=%.5f\n", median(plain),
              median(interleaved->trainer_ms), median(added) - 1, median(apart) - 1);
} catch (const lockstep::Error& error) {
  std::cerr << "bench_trainer: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
