// A rank of the jobs of bench/hosts.py and tests/procs/hosts/traffic.py, which measures all_reduce or training steps
// between hosts. Rank 0 prints "ready" after warming up, blocks until a line arrives on its standard input, and prints
// its seconds as a line of JSON.
//
//   bench_hosts_rank all_reduce BYTES WIRE RUNS
//   bench_hosts_rank step HOST_SYNC_EVERY WIRE RUNS BATCH BUCKET_BYTES OPTIMIZER (torch, fused or sharded)
//
// WIRE is float32, bfloat16, float16 or int8, which in steps is the hook.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/base/parse.h"

namespace {

using lockstep::Group;

at::ScalarType parse_wire_dtype(const std::string& name) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kChar})
    if (lockstep::comm::name(dtype) == name) return dtype;
  throw lockstep::UsageError("WIRE is " + name + "; expected float32, bfloat16, float16 or int8");
}

const std::vector<lockstep::optim::SGD::Group> kOneGroup;

void check_optimizer(const std::string& optimizer) {
  if (optimizer != "torch" && optimizer != "fused" && optimizer != "sharded")
    throw lockstep::UsageError("OPTIMIZER is " + optimizer + "; expected torch, fused or sharded");
}

/// Returns the seconds of each of `runs` calls. Before the first call, rank 0 prints "ready" and blocks until a line
/// arrives on stdin.
std::vector<double> measure(const Group& world, int runs, const std::function<void()>& call) {
  if (world.rank() == 0) {
    std::puts("ready");
    std::fflush(stdout);
    std::string line;
    std::getline(std::cin, line);
  }
  world.barrier();
  std::vector<double> seconds;
  for (int run = 0; run < runs; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return seconds;
}

void print(const Group& world, const std::vector<double>& seconds, const std::string& more) {
  if (world.rank() != 0) return;
  std::printf("{\"transport\": \"%s\"%s, \"seconds\": [", std::string(world.transport()).c_str(), more.c_str());
  for (std::size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.7f", i ? ", " : "", seconds[i]);
  std::printf("]}\n");
  std::fflush(stdout);
}

void all_reduce(const Group& world, std::int64_t bytes, at::ScalarType wire_dtype, int runs) {
  const at::Tensor tensor = at::ones({bytes / 4});
  const auto call = [&] { world.all_reduce(tensor, lockstep::ReduceOp::kMean, {.wire_dtype = wire_dtype}); };
  for (int warm = 0; warm < (bytes > (1 << 20) ? 1 : 100); ++warm) call();
  const auto seconds = measure(world, runs, call);
  if (!tensor.eq(1).all().item<bool>()) throw std::runtime_error("all_reduce: the mean of ones is not one");
  print(world, seconds, "");
}

void steps(const Group& world, const lockstep::DdpOptions& options, std::int64_t batch_size, int runs,
           const std::string& kind) {
  check_optimizer(kind);
  torch::manual_seed(1);
  constexpr int kLayers = 10;
  constexpr std::int64_t kWidth = 1000;
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::ReLU());
  }
  torch::manual_seed(static_cast<std::uint64_t>(world.rank()));
  const at::Tensor batch = torch::randn({batch_size, kWidth});
  std::unique_ptr<torch::optim::Optimizer> optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), 0.01);
  const auto step = [&] {
    net->zero_grad();
    torch::mse_loss(net->forward(batch), batch).backward();
    optimizer->step();
  };
  for (int warm = 0; warm < 5; ++warm) step();
  const auto alone = measure(world, runs, step);
  lockstep::DistributedDataParallel ddp(net, world, options);
  if (kind != "torch")
    optimizer = std::make_unique<lockstep::optim::SGD>(ddp, lockstep::optim::SGDOptions{.lr = 0.01}, kOneGroup,
                                                       lockstep::optim::FusedOptions{.shard_state = kind == "sharded"});
  for (int warm = 0; warm < 16; ++warm) step();  // covers the replica comparison, and a whole number of averages
  const auto together = measure(world, runs, step);
  std::string compute = ", \"compute_seconds\": [";
  for (std::size_t i = 0; i < alone.size(); ++i) compute += (i ? ", " : "") + std::to_string(alone[i]);
  print(world, together, compute + "]");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string what = argc >= 5 ? argv[1] : "";
    const auto number = [&](int i) { return lockstep::base::parse_int_in_range("argument", argv[i], 1, 1 << 30); };
    if (!(what == "all_reduce" && argc == 5) && !(what == "step" && argc == 8))
      throw lockstep::UsageError(
          "usage: bench_hosts_rank all_reduce BYTES WIRE RUNS | step HOST_SYNC_EVERY WIRE RUNS BATCH BUCKET_BYTES "
          "OPTIMIZER");
    Group world = lockstep::init();
    if (what == "all_reduce")
      all_reduce(world, number(2), parse_wire_dtype(argv[3]), static_cast<int>(number(4)));
    else {
      lockstep::DdpOptions options{.bucket_bytes = {1 << 20, number(6)},
                                   .average_hosts_every = static_cast<int>(number(2))};
      if (const at::ScalarType wire = parse_wire_dtype(argv[3]); wire == at::kChar)
        options.hook = std::make_shared<lockstep::ddp::Int8Hook>();
      else
        options.wire_dtype = wire;
      steps(world, options, number(5), static_cast<int>(number(4)), argv[7]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_hosts_rank: %s\n", error.what());
    return 1;
  }
  return 0;
}
