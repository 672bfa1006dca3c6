#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>

#include "bench/ranks/c10d_baselines.h"
#include "bench/ranks/harness_channel.h"
#include "bench/ranks/rank.h"

namespace lockstep::bench {
namespace {

/// An implementation: the operation to measure, and a function that synchronizes the ranks before each sample.
struct TimedOperation {
  std::function<void(std::size_t bytes)> prepare;
  std::function<void()> run;
  std::function<void()> synchronize;
};

/// Checks that the operation computes the sum of rank + 1 over the ranks.
void check_sum(TimedOperation& operation, const at::Tensor& whole, std::size_t bytes) {
  operation.prepare(bytes);
  whole.fill_(static_cast<double>(own_rank() + 1));
  operation.run();
  const int n = num_ranks();
  const at::Tensor part = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4));
  if (!part.eq(static_cast<float>(n * (n + 1) / 2)).all().item<bool>())
    throw base::Error(base::Cause::kInternal, "bench: an all_reduce of " + std::to_string(bytes) +
                                                  " bytes has a wrong sum on rank " + std::to_string(own_rank()));
  whole.zero_();
}

void serve_requests(TimedOperation& operation, HarnessChannel& channel) {
  channel.send_result({});
  while (const auto request = channel.next_request()) {
    const auto bytes = static_cast<std::size_t>(request->at(0));
    const std::int64_t repetitions = request->at(1);
    operation.prepare(bytes);
    std::vector<double> seconds;
    operation.run();  // warm up: the caches contain data of other implementations
    for (std::int64_t sample = 0; sample < request->at(2); ++sample) {
      operation.synchronize();
      const double begin = now();
      for (std::int64_t i = 0; i < repetitions; ++i) operation.run();
      seconds.push_back((now() - begin) / static_cast<double>(repetitions));
    }
    channel.send_result(seconds);
  }
}

void run_lockstep(const std::string& prefix, std::size_t max_bytes) {
  Group world = init();
  const at::Tensor whole = torch::zeros({static_cast<std::int64_t>(max_bytes / 4)});
  at::Tensor part = whole;
  TimedOperation operation{[&](std::size_t bytes) { part = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4)); },
                           [&] { world.all_reduce(part); }, [&] { world.barrier(); }};
  check_sum(operation, whole, max_bytes);
  HarnessChannel channel(prefix, own_rank());
  serve_requests(operation, channel);
}

void run_gloo(const std::string& prefix, std::size_t max_bytes) {
  GlooBaseline gloo;
  const at::Tensor whole = torch::zeros({static_cast<std::int64_t>(max_bytes / 4)});
  std::vector<at::Tensor> part{whole};
  TimedOperation operation{
      [&](std::size_t bytes) { part[0] = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4)); },
      [&] { gloo.all_reduce(part); }, [&] { gloo.barrier(); }};
  check_sum(operation, whole, max_bytes);
  HarnessChannel channel(prefix, own_rank());
  serve_requests(operation, channel);
}

/// Measures copies between two private buffers. A sample ends when the slowest rank has finished its copy.
void run_memcpy(const std::string& prefix, std::size_t max_bytes) {
  Group world = init({.arena = false});
  const at::Tensor from = torch::ones({static_cast<std::int64_t>(max_bytes / 4)});
  const at::Tensor to = torch::zeros_like(from);
  std::size_t size = max_bytes;
  TimedOperation operation{[&](std::size_t bytes) { size = bytes; },
                           [&] {
                             std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), size);
                             world.barrier();
                           },
                           [&] { world.barrier(); }};
  HarnessChannel channel(prefix, own_rank());
  serve_requests(operation, channel);
}

}  // namespace

void run_all_reduce_rank(const std::string& impl, const std::string& prefix, std::size_t max_bytes) {
  torch::set_num_threads(1);
  if (impl == "lockstep") return run_lockstep(prefix, max_bytes);
  if (impl == "gloo") return run_gloo(prefix, max_bytes);
  if (impl == "memcpy") return run_memcpy(prefix, max_bytes);
  throw UsageError("lockstep-bench rank all-reduce: unknown implementation " + impl +
                   "; expected lockstep, gloo or memcpy");
}

}  // namespace lockstep::bench
