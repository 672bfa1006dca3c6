// A rank that trains and saves a checkpoint every tenth step: measures how long a save blocks the rank, and the steps
// during a save. Started by checkpoint_save.py.
//
//   bench_checkpoint_save OPTIMIZER WRITERS WIDTH LAYERS ROWS ROUNDS FOLDER
//
// OPTIMIZER: torch or fused; WRITERS: one (rank 0 writes everything) or all (each rank writes its part).
//
// A round is 10 steps without saves and 20 steps with two saves. Rank 0 prints a line of JSON: bytes (of a checkpoint)
// and medians in milliseconds: step (without saves), step_saving (the 20 steps with saves, including the saves), stall
// (time that a save blocks the caller, of the slowest rank), written (time until the checkpoint is durable).
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/lockstep.h"

namespace {

namespace checkpoint = lockstep::checkpoint;
using lockstep::Group;
using Clock = std::chrono::steady_clock;

constexpr int kStepsWithout = 10, kStepsWith = 20, kSaveEvery = 10;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values.size() % 2 == 1 ? values[values.size() / 2]
                                : (values[values.size() / 2 - 1] + values[values.size() / 2]) / 2;
}

double longest(const Group& world, double value) {
  const at::Tensor all = torch::full({1}, value, torch::kDouble);
  world.all_reduce(all, lockstep::ReduceOp::kMax);
  return all.item<double>();
}

struct Options {
  std::string optimizer, writers;
  std::int64_t width = 2048, layers = 4, rows = 512;
  int rounds = 4;
  std::string folder;
};

class Training {
 public:
  Training(const Group& world, const Options& options) : world_(world), options_(options) {
    torch::manual_seed(1);
    for (std::int64_t i = 0; i < options.layers; ++i) {
      net_->push_back(torch::nn::Linear(options.width, options.width));
      net_->push_back(torch::nn::Tanh());
    }
    ddp_ = std::make_unique<lockstep::DistributedDataParallel>(net_, world_);
    if (options.optimizer == "fused") {
      auto fused = std::make_unique<lockstep::optim::AdamW>(*ddp_, lockstep::optim::AdamWOptions{.lr = 1e-4});
      fused_ = fused.get();
      optimizer_ = std::move(fused);
    } else {
      optimizer_ = std::make_unique<torch::optim::AdamW>(net_->parameters(), torch::optim::AdamWOptions(1e-4));
    }
    torch::manual_seed(static_cast<std::uint64_t>(2 + world.rank()));
    data_ = torch::randn({options.rows, options.width});
  }

  void step() {
    optimizer_->zero_grad();
    net_->forward(data_).pow(2).mean().backward();
    optimizer_->step();
  }

  checkpoint::CheckpointParts parts() {
    const bool all = options_.writers == "all";
    checkpoint::StateDict state;
    if (fused_)
      state = fused_->state_dict();
    else
      state = checkpoint::optimizer_state_dict(*optimizer_, *net_);
    checkpoint::CheckpointParts parts;
    int number = 0;
    const auto mine = [&] { return all ? number++ % world_.size() == world_.rank() : world_.rank() == 0; };
    for (const auto& item : net_->named_parameters())
      if (mine()) parts["model"][item.key()] = item.value().detach();
    for (const auto& [name, value] : state)
      if (mine()) parts["optimizer"][name] = value;
    return parts;
  }

 private:
  const Group& world_;
  const Options& options_;
  torch::nn::Sequential net_;
  std::unique_ptr<lockstep::DistributedDataParallel> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  lockstep::optim::AdamW* fused_ = nullptr;
  at::Tensor data_;
};

int run(const Options& options) {
  Group world = lockstep::init();
  Training training(world, options);
  checkpoint::Checkpointer checkpoints(world, options.folder);
  std::vector<double> steps, steps_saving, stalls, written;
  double num_bytes = 0;
  const auto finished = [&] {
    const auto report = checkpoints.wait();  // bounded: by the timeouts of the group and by the disk
    if (!report) return;
    written.push_back(1e3 * report->duration.count());
    num_bytes = static_cast<double>(report->num_bytes);
  };
  for (int i = 0; i < 3; ++i) training.step();
  for (int round = 0; round < options.rounds; ++round) {
    for (int i = 0; i < kStepsWithout + kStepsWith; ++i) {
      const auto begin = Clock::now();
      training.step();
      if (i >= kStepsWithout && i % kSaveEvery == 0) {
        const auto save_begin = Clock::now();
        finished();
        checkpoints.save_async(round * 100 + i, training.parts());
        stalls.push_back(ms_since(save_begin));
      }
      (i < kStepsWithout ? steps : steps_saving).push_back(ms_since(begin));
    }
    finished();
  }
  for (double& stall : stalls) stall = longest(world, stall);
  if (world.rank() == 0)
    std::printf(
        "{\"optimizer\": \"%s\", \"writers\": \"%s\", \"bytes\": %.0f, \"step\": %.2f, \"step_saving\": %.2f, "
        "\"stall\": %.2f, \"first_stall\": %.2f, \"written\": %.2f}\n",
        options.optimizer.c_str(), options.writers.c_str(), num_bytes, median(steps), median(steps_saving),
        median(stalls), stalls.front(), median(written));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    if (count != 8)
      throw lockstep::UsageError("usage: bench_checkpoint_save OPTIMIZER WRITERS WIDTH LAYERS ROWS ROUNDS FOLDER");
    return run({.optimizer = words[1],
                .writers = words[2],
                .width = std::stoll(words[3]),
                .layers = std::stoll(words[4]),
                .rows = std::stoll(words[5]),
                .rounds = std::stoi(words[6]),
                .folder = words[7]});
  });
}
