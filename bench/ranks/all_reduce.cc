#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>

#include "bench/ranks/c10d_baselines.h"
#include "bench/ranks/rank.h"
#include "bench/ranks/harness_channel.h"

namespace lockstep::bench {
namespace {

/// One implementation: what is repeated, and what lines the ranks up before a sample.
struct Contender {
  std::function<void(std::size_t bytes)> prepare;
  std::function<void()> once;
  std::function<void()> line_up;
};

/// The sum of rank + 1 over the ranks, as somebody who did nothing would not have it.
void check_sum(Contender& contender, const at::Tensor& whole, std::size_t bytes) {
  contender.prepare(bytes);
  whole.fill_(static_cast<double>(rank_here() + 1));
  contender.once();
  const int n = num_ranks_here();
  const at::Tensor part = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4));
  if (!part.eq(static_cast<float>(n * (n + 1) / 2)).all().item<bool>())
    throw base::Error(base::Cause::kInternal, "bench: an all_reduce of " + std::to_string(bytes) +
                                                  " bytes has a wrong sum on rank " + std::to_string(rank_here()));
  whole.zero_();
}

void take_turns(Contender& contender, Turns& turns) {
  turns.answer({});
  while (const auto order = turns.next()) {
    const auto bytes = static_cast<std::size_t>(order->at(0));
    const std::int64_t repetitions = order->at(1);
    contender.prepare(bytes);
    std::vector<double> seconds;
    contender.once();  // finds the caches full of a neighbour's data
    for (std::int64_t sample = 0; sample < order->at(2); ++sample) {
      contender.line_up();
      const double begin = now();
      for (std::int64_t i = 0; i < repetitions; ++i) contender.once();
      seconds.push_back((now() - begin) / static_cast<double>(repetitions));
    }
    turns.answer(seconds);
  }
}

void run_lockstep(const std::string& prefix, std::size_t max_bytes) {
  Group world = init();
  const at::Tensor whole = torch::zeros({static_cast<std::int64_t>(max_bytes / 4)});
  at::Tensor part = whole;
  Contender contender{[&](std::size_t bytes) { part = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4)); },
                      [&] { world.all_reduce(part); }, [&] { world.barrier(); }};
  check_sum(contender, whole, max_bytes);
  Turns turns(prefix, rank_here());
  take_turns(contender, turns);
}

void run_gloo(const std::string& prefix, std::size_t max_bytes) {
  GlooPeer gloo;
  const at::Tensor whole = torch::zeros({static_cast<std::int64_t>(max_bytes / 4)});
  std::vector<at::Tensor> part{whole};
  Contender contender{[&](std::size_t bytes) { part[0] = whole.narrow(0, 0, static_cast<std::int64_t>(bytes / 4)); },
                      [&] { gloo.all_reduce(part); }, [&] { gloo.barrier(); }};
  check_sum(contender, whole, max_bytes);
  Turns turns(prefix, rank_here());
  take_turns(contender, turns);
}

/// A sample ends when the slowest rank has copied.
void run_memcpy(const std::string& prefix, std::size_t max_bytes) {
  Group world = init({.arena = false});
  const at::Tensor from = torch::ones({static_cast<std::int64_t>(max_bytes / 4)});
  const at::Tensor to = torch::zeros_like(from);
  std::size_t size = max_bytes;
  Contender contender{[&](std::size_t bytes) { size = bytes; },
                      [&] {
                        std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), size);
                        world.barrier();
                      },
                      [&] { world.barrier(); }};
  Turns turns(prefix, rank_here());
  take_turns(contender, turns);
}

}  // namespace

void all_reduce_rank(const std::string& impl, const std::string& prefix, std::size_t max_bytes) {
  torch::set_num_threads(1);
  if (impl == "lockstep") return run_lockstep(prefix, max_bytes);
  if (impl == "gloo") return run_gloo(prefix, max_bytes);
  if (impl == "memcpy") return run_memcpy(prefix, max_bytes);
  throw UsageError("lockstep-bench rank all-reduce: the implementation is " + impl +
                   "; allowed are lockstep, gloo and memcpy");
}

}  // namespace lockstep::bench
