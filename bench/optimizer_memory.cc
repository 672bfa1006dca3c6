// A rank that trains with Adam and measures the memory of the optimizer state: with torch's optimizer, with Lockstep's,
// and with Lockstep's sharded over the ranks (ZeRO-1). Started by optimizer_memory.py.
//
//   bench_optimizer_memory KIND WIDTH LAYERS      KIND: torch, ours, sharded
//
// Rank 0 prints a line of JSON: kind, parameters, bytes (of state tensors, mean over the ranks), pss (growth of the
// proportional set size, mean over the ranks), losses.
#include <malloc.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "lockstep/lockstep.h"

namespace {

using lockstep::Group;

constexpr int kSteps = 6;

/// Returns the proportional set size of this process in bytes, in which each shared page is divided by the number of
/// processes that map it.
double own_memory() {
  lockstep::trim_arena();
  ::malloc_trim(0);  // free memory that is reused later would hide growth
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;)
    if (word == "Pss:") {
      double kib = 0;
      rollup >> kib;
      return kib * 1024;
    }
  return 0;
}

double mean(const Group& world, double value) {
  const at::Tensor all = torch::full({1}, value, torch::kDouble);
  world.all_reduce(all, lockstep::ReduceOp::kSum);
  return all.item<double>() / world.size();
}

std::unique_ptr<torch::optim::Optimizer> make(const std::string& kind, torch::nn::Module& net,
                                              lockstep::DistributedDataParallel& ddp) {
  if (kind == "torch") return std::make_unique<torch::optim::Adam>(net.parameters(), 1e-4);
  return std::make_unique<lockstep::optim::Adam>(ddp, lockstep::optim::AdamOptions{.lr = 1e-4},
                                                 std::vector<lockstep::optim::Adam::Group>(),
                                                 lockstep::optim::FusedOptions{.shard_state = kind == "sharded"});
}

/// Returns the bytes of this rank's optimizer state. If the ranks of a host share the state, returns this rank's
/// fraction of it.
double state_bytes(torch::optim::Optimizer& optimizer, const Group& world) {
  double bytes = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& one = static_cast<const torch::optim::AdamParamState&>(*state);
    bytes += static_cast<double>(one.exp_avg().nbytes() + one.exp_avg_sq().nbytes());
  }
  const auto* ours = dynamic_cast<lockstep::optim::FusedOptimizer*>(&optimizer);
  return ours && ours->shares_parameters() ? bytes / world.local_size() : bytes;
}

int run(const std::string& kind, std::int64_t width, int layers) {
  Group world = lockstep::init();
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  lockstep::DistributedDataParallel ddp(net, world);
  const auto step = [&](int number) {
    torch::manual_seed(100 + number * world.size() + world.rank());
    const at::Tensor loss = (net->forward(torch::randn({4, width})) - torch::randn({4, width})).pow(2).mean();
    loss.backward();
    return mean(world, loss.item<double>());
  };
  for (int number = 0; number < 3; ++number) {  // allocates gradients and reduction buffers, which stay
    net->zero_grad(false);
    step(number);
  }
  world.barrier();
  const double before = own_memory();
  const auto optimizer = make(kind, *net, ddp);
  std::string losses;
  for (int number = 0; number < kSteps; ++number) {
    optimizer->zero_grad(false);
    char text[32];
    std::snprintf(text, sizeof text, "%s%.9g", number == 0 ? "" : ", ", step(number));
    losses += text;
    optimizer->step();
  }
  world.barrier();
  const double grown = mean(world, own_memory() - before), bytes = mean(world, state_bytes(*optimizer, world));
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : net->parameters()) parameters += parameter.numel();
  if (world.rank() == 0)
    std::printf(
        "{\"kind\": \"%s\", \"transport\": \"%s\", \"ranks\": %d, \"parameters\": %lld, \"bytes\": %.0f, \"pss\": "
        "%.0f, \"losses\": [%s]}\n",
        kind.c_str(), std::string(world.transport()).c_str(), world.size(), static_cast<long long>(parameters), bytes,
        grown, losses.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    if (count != 4) throw lockstep::UsageError("usage: bench_optimizer_memory KIND WIDTH LAYERS");
    return run(words[1], std::stoll(words[2]), std::stoi(words[3]));
  });
}
