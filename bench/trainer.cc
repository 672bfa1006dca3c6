// What fit() adds to a step: the same model in a plain loop and in the Trainer, with its line, loggers and report, in
// turns in one process.
//   bench_trainer STEPS WIDTH FOLDER
// One rank; blocks of 20 steps of each. There are two plain loops, one made before the Trainer's model and one behind
// it, and what the Trainer takes is compared with their mean: where in memory a model came to lie is up to 1 % of a
// step. Prints as its last line "plain_ms=P trainer_ms=T added=RATIO plain_apart=RATIO": medians over the blocks, the
// median of the Trainer's block over those beside it, less 1, and how far the two plain loops lie apart, which is what
// nobody can measure better.
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
namespace train = lockstep::train;

constexpr std::int64_t kFeatures = 256, kClasses = 10, kBatch = 64, kSamples = 64 * 100000, kWarm = 100, kBlock = 20;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width)
      : first(register_module("first", torch::nn::Linear(kFeatures, width))),
        second(register_module("second", torch::nn::Linear(width, width))),
        last(register_module("last", torch::nn::Linear(width, kClasses))) {}
  torch::Tensor loss(const Example& batch) {
    return torch::cross_entropy_loss(last(torch::relu(second(torch::relu(first(batch.data))))), batch.target);
  }
  torch::Tensor training_step(Example& batch, train::StepLog&) { return loss(batch); }
  std::vector<train::OptimizerConfig> configure_optimizers(train::TrainingSetup& setup) {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.01))}};
  }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(Net);

/// The same batch again and again, so that nobody waits for data.
auto make_loader(lockstep::Group& world) {
  torch::manual_seed(3);
  struct One {
    Example batch;
    Example get_batch(const std::vector<std::size_t>&) { return batch; }
    std::size_t size() const { return kSamples; }
  };
  return lockstep::data::make_loader(One{{torch::randn({kBatch, kFeatures}), torch::randint(kClasses, {kBatch})}},
                                     world, {.batch_size = kBatch});
}

/// The plain loop, some steps at a time.
class PlainLoop {
 public:
  PlainLoop(lockstep::Group& world, std::int64_t width)
      : net_(make_initial_net(width)),
        ddp_(net_, world),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)),
        loader_(make_loader(world)),
        epoch_(loader_.epoch(0)),
        at_(epoch_.begin()) {}
  void run(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i, ++at_) {
      optimizer_.zero_grad();
      net_->loss(*at_).backward();
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
  lockstep::data::Epoch<Example>::Iterator at_;
};

double ms_each(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count() / static_cast<double>(kBlock);
}

/// After each block of the Trainer's steps it runs as many of each plain loop.
struct InterleavedLoops : train::Callback {
  InterleavedLoops(PlainLoop& one, PlainLoop& other) : before(one), behind(other) {}
  void on_step(train::FitContext& fit) override {
    if (fit.step() % kBlock != 0) return;
    const auto now = Clock::now();
    before.run(kBlock);
    const auto between = Clock::now();
    behind.run(kBlock);
    const auto end = Clock::now();
    if (fit.step() > kWarm) {
      trainer_ms.push_back(ms_each(now - begin));
      before_ms.push_back(ms_each(between - now));
      behind_ms.push_back(ms_each(end - between));
    }
    begin = end;
  }
  PlainLoop &before, &behind;
  Clock::time_point begin;
  std::vector<double> trainer_ms, before_ms, behind_ms;
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
  PlainLoop behind(trainer.world(), width);
  const auto interleaved = std::make_shared<InterleavedLoops>(before, behind);
  trainer.add(interleaved);
  trainer.fit(net, make_loader(trainer.world()));
  std::vector<double> plain, added, apart;
  for (std::size_t i = 0; i < interleaved->trainer_ms.size(); ++i) {
    plain.push_back((interleaved->before_ms[i] + interleaved->behind_ms[i]) / 2);
    added.push_back(interleaved->trainer_ms[i] / plain.back());
    apart.push_back(interleaved->behind_ms[i] / interleaved->before_ms[i]);
  }
  std::printf("plain_ms=%.4f trainer_ms=%.4f added=%.5f plain_apart=%.5f\n", median(plain),
              median(interleaved->trainer_ms), median(added) - 1, median(apart) - 1);
} catch (const lockstep::Error& error) {
  std::cerr << "bench_trainer: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
