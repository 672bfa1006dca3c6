// The structures of comm/shm in many schedules.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "lockstep/comm/shm/gradient_table.h"
#include "lockstep/comm/shm/sync_op.h"
#include "tests/schedules/explore.h"

namespace lockstep::schedules {
namespace {

using base::Deadline;
using comm::ChunkSink;
using comm::CollectiveKind;
using comm::GradientChunk;
using comm::PendingPtr;
using comm::Transport;
using comm::shm::ControlBlocks;
using comm::shm::EarlyWork;
using comm::shm::GradientTable;
using comm::shm::SyncOp;
using comm::shm::SyncOpQueue;

/// Waits for `pending`. Returns false if it failed, which is correct only after a rank was killed.
bool finished(const Rank& self, const PendingPtr& pending) {
  pending->wait_until(Deadline::never());
  if (!pending->error()) return true;
  if (!self.may_fail()) std::rethrow_exception(pending->error());
  return false;
}

void check_all(const float* data, std::int64_t count, float expected) {
  for (std::int64_t k = 0; k < count; ++k)
    if (data[k] != expected)
      Fiber::fail("element " + std::to_string(k) + " is " + std::to_string(data[k]) + "; expected " +
                  std::to_string(expected));
}
void check_all(const at::Tensor& tensor, float expected) {
  check_all(tensor.const_data_ptr<float>(), tensor.numel(), expected);
}

constexpr std::array<Options, 2> kTwoAndThree{Options{.num_ranks = 2}, Options{.num_ranks = 3}};
Options killing(Options options) {
  options.kill_one = true;
  return options;
}

/// Each rank counts here, without points, what it has done.
struct Counts {
  std::array<std::uint32_t, 8> published{}, computed{};
};

/// A barrier that checks itself, with one or two phases.
class Barrier final : public SyncOp {
 public:
  Barrier(const ControlBlocks& control_blocks, std::uint32_t number, Counts& counts, bool two_phases)
      : SyncOp(control_blocks, number), counts_(counts), two_phases_(two_phases) {}

 private:
  void publish() override { counts_.published[own()] = number_; }
  void compute() override {
    for (std::size_t rank = 0; rank < size(); ++rank)
      Fiber::check(counts_.published[rank] >= number_, "computes before rank " + std::to_string(rank) + " published");
    counts_.computed[own()] = number_;
  }
  void complete() override {
    for (std::size_t rank = 0; rank < size(); ++rank)
      Fiber::check(counts_.computed[rank] >= number_, "completes before rank " + std::to_string(rank) + " computed");
  }
  bool is_complete_after_compute() const override { return !two_phases_; }
  std::size_t own() const { return static_cast<std::size_t>(control_blocks_.rank()); }
  std::size_t size() const { return static_cast<std::size_t>(control_blocks_.size()); }
  Counts& counts_;
  const bool two_phases_;
};

PendingPtr start_barrier(SyncOpQueue& queue, Counts& counts, bool two_phases) {
  const auto barrier = std::make_shared<Barrier>(queue.control_blocks(), queue.reserve_numbers(1), counts, two_phases);
  return queue.add([barrier](Deadline deadline) { return barrier->advance(deadline); });
}

void explore_barriers(const Options& options, bool leave) {
  Counts counts;
  explore(options, [&](Rank& self) {
    if (self.rank == 0) counts = {};
    const auto blocks = self.connect("barrier");
    SyncOpQueue queue("shm", *blocks);
    Fiber::ready();
    for (int n = 1; n <= 4; ++n)
      if (!finished(self, start_barrier(queue, counts, n % 2 == 0))) break;
    if (leave) self.leave();
  });
}

TEST(Schedules, Barrier) {
  for (const Options& options : kTwoAndThree) explore_barriers(options, false);
}
TEST(Schedules, BarrierWithAKilledRank) {
  for (const Options& options : kTwoAndThree) explore_barriers(killing(options), false);
}
TEST(Schedules, LastBarrierBeforeAProcessEnds) { explore_barriers({.num_ranks = 3}, true); }

/// Four all_reduces of `count` floats.
void explore_all_reduce(const Options& options, std::int64_t count) {
  explore(options, [&](Rank& self) {
    const auto transport = self.transport("all_reduce");
    const at::Tensor tensor = self.tensor(count, 0);
    Fiber::ready();
    for (int n = 1; n <= 4; ++n) {
      tensor.fill_(n * (self.rank + 1));
      if (!finished(self, transport->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor})))
        return;
      check_all(tensor, static_cast<float>(n * self.size * (self.size + 1)) / 2);
    }
  });
}

TEST(Schedules, AllReduceInControlBlocks) {
  for (const Options& options : kTwoAndThree) explore_all_reduce(options, 5);
}
TEST(Schedules, AllReduceInPlace) {
  for (const Options& options : kTwoAndThree) explore_all_reduce(options, 700);
}
TEST(Schedules, AllReduceWithAKilledRank) {
  for (const std::int64_t count : {5, 700}) explore_all_reduce(killing({.num_ranks = 3}), count);
}

TEST(Schedules, CheckedAllReduce) {
  explore({.num_ranks = 3}, [&](Rank& self) {
    const auto transport = self.transport("checked");
    const at::Tensor tensor = self.tensor(4, 0);
    std::vector<char> all;
    Fiber::ready();
    for (int n = 1; n <= 4; ++n) {
      tensor.fill_(n);
      const char call = n == 3 && self.rank == 1 ? 'b' : 'a';
      all.clear();
      finished(self,
               transport->start_checked(
                   {.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor},
                   {.bytes = &call, .size = 1, .hash = static_cast<std::uint64_t>(call), .all_signatures = &all}));
      Fiber::check(std::string(all.begin(), all.end()) == (n == 3 ? "aba" : ""), "the signatures are wrong");
      check_all(tensor, static_cast<float>(n == 3 ? n : n * self.size));
    }
  });
}

TEST(Schedules, BroadcastAndReduceScatter) {
  explore({.num_ranks = 3}, [&](Rank& self) {
    const auto transport = self.transport("others");
    const at::Tensor tensor = self.tensor(600, 0), parts = self.tensor(9, 0), part = self.tensor(3, 0);
    Fiber::ready();
    for (int n = 1; n <= 3; ++n) {
      const int root = n % self.size;
      tensor.fill_(self.rank == root ? n : 0);
      parts.fill_(n);
      finished(self,
               transport->start({.kind = CollectiveKind::kBroadcast, .input = tensor, .output = tensor, .root = root}));
      finished(self, transport->start({.kind = CollectiveKind::kReduceScatter, .input = parts, .output = part}));
      check_all(tensor, static_cast<float>(n));
      check_all(part, static_cast<float>(n * self.size));
    }
  });
}

void explore_messages(const Options& options) {
  explore(options, [&](Rank& self) {
    const auto transport = self.transport("messages");
    const int next = (self.rank + 1) % self.size, previous = (self.rank + self.size - 1) % self.size;
    const at::Tensor out = self.tensor(3, 0), in = self.tensor(3, 0);
    Fiber::ready();
    for (int n = 1; n <= 4; ++n) {
      out.fill_(n * 10 + self.rank);
      const PendingPtr send = transport->start({.kind = CollectiveKind::kSend, .input = out, .root = next});
      if (!finished(self, transport->start({.kind = CollectiveKind::kRecv, .output = in, .root = previous}))) return;
      if (!finished(self, send)) return;
      check_all(in, static_cast<float>(n * 10 + previous));
    }
  });
}

TEST(Schedules, Messages) {
  for (const Options& options : kTwoAndThree) explore_messages(options);
}
TEST(Schedules, MessagesWithAKilledRank) { explore_messages(killing({.num_ranks = 3})); }

// Two chunks, one chunk, three chunks, in chunks of 16 floats.
constexpr std::array<std::int64_t, 3> kCounts{20, 5, 40};
constexpr std::size_t kChunkBytes = 64;

/// In round 2 the last rank has not computed the first gradient, and in round 3 no rank has computed the second one.
bool publishes(const Rank& self, int rank, std::size_t index, std::uint32_t round) {
  return !(round == 2 && rank == self.size - 1 && index == 0) && !(round == 3 && index == 1);
}
float gradient(int rank, std::size_t index, std::uint32_t round) {
  return static_cast<float>(round) * 8 + static_cast<float>(rank) * 4 + static_cast<float>(index);
}
float mean(const Rank& self, std::size_t index, std::uint32_t round) {
  float sum = 0;
  for (int rank = 0; rank < self.size; ++rank)
    if (publishes(self, rank, index, round)) sum += gradient(rank, index, round);
  return sum / static_cast<float>(self.size);
}
bool any_publishes(std::size_t index, std::uint32_t round) { return !(round == 3 && index == 1); }

/// The gradients of a rank and its table.
struct Gradients {
  const Rank& self;
  std::unique_ptr<ControlBlocks> blocks;
  SyncOpQueue queue;
  std::vector<at::Tensor> tensors, others;  // of odd and of even rounds: addresses change, as those of gradients do
  std::unique_ptr<GradientTable> table;

  explicit Gradients(const Rank& rank) : self(rank), blocks(rank.connect("blocks")), queue("shm", *blocks) {
    for (const std::int64_t count : kCounts) {
      tensors.push_back(rank.tensor(count, 0));
      others.push_back(rank.tensor(count, 0));
    }
    table = std::make_unique<GradientTable>(
        tensors, queue,
        GradientTable::Options{.store = std::make_shared<job::PrefixStore>("table", rank.store),
                               .timeout = std::chrono::hours(1),
                               .chunk_bytes = kChunkBytes});
  }

  /// Each rank in another order, so that every rank is late with some gradient.
  void publish(std::uint32_t round) {
    tensors.swap(others);
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(self.rank)) % tensors.size();
      if (!publishes(self, self.rank, i, round)) continue;
      tensors[i].fill_(gradient(self.rank, i, round));
      table->publish(i, tensors[i].mutable_data_ptr(), true);
    }
  }
};

void explore_reduce_rounds(const Options& options, EarlyWork early) {
  Counts counts;
  explore(options, [&](Rank& self) {
    if (self.rank == 0) counts = {};
    Gradients gradients(self);
    Fiber::ready();
    for (std::uint32_t round = 1; round <= 3; ++round) {
      gradients.table->begin_round(early);
      gradients.publish(round);
      if (!finished(self, gradients.table->finish())) return;
      for (std::size_t i = 0; i < kCounts.size(); ++i) {
        Fiber::check(gradients.table->presence()[i].dense == any_publishes(i, round), "presence is wrong");
        if (!any_publishes(i, round)) continue;
        const void* result =
            publishes(self, self.rank, i, round) ? gradients.tensors[i].const_data_ptr() : gradients.table->mean(i);
        check_all(static_cast<const float*>(result), kCounts[i], mean(self, i, round));
      }
      // Another rank has read a mean here.
      if (gradients.table->has_remote_readers() && !finished(self, start_barrier(gradients.queue, counts, false)))
        return;
    }
  });
}

TEST(Schedules, GradientRounds) {
  for (const Options& options : kTwoAndThree) explore_reduce_rounds(options, EarlyWork::kReduce);
}
TEST(Schedules, GradientRoundsReducedAtTheEnd) { explore_reduce_rounds({.num_ranks = 2}, EarlyWork::kNone); }
TEST(Schedules, GradientRoundsWithAKilledRank) {
  for (const Options& options : kTwoAndThree) explore_reduce_rounds(killing(options), EarlyWork::kReduce);
}

/// Counts how often each element was consumed, by all ranks together, and checks its mean.
class CheckingSink final : public ChunkSink {
 public:
  CheckingSink(const Rank& self, std::vector<std::vector<int>>& consumed) : self_(self), consumed_(consumed) {}
  std::uint32_t round = 0;

  void consume(const GradientChunk& chunk) override {
    for (std::size_t k = 0; k < chunk.count; ++k) {
      float sum = 0;
      for (std::size_t i = 0; i < chunk.num_gradients; ++i) sum += static_cast<const float*>(chunk.gradients[i])[k];
      Fiber::check(sum / static_cast<float>(chunk.divisor) == mean(self_, chunk.gradient_index, round),
                   "a chunk has a wrong mean");
      ++consumed_[chunk.gradient_index][chunk.offset + k];
    }
  }
  void finish_gradient(std::size_t) override {}

 private:
  const Rank& self_;
  std::vector<std::vector<int>>& consumed_;
};

void explore_consume_rounds(const Options& options, EarlyWork early) {
  Counts counts;
  std::vector<std::vector<int>> consumed;
  explore(options, [&](Rank& self) {
    if (self.rank == 0) {
      counts = {};
      consumed.clear();
      for (const std::int64_t count : kCounts) consumed.emplace_back(static_cast<std::size_t>(count));
    }
    Gradients gradients(self);
    CheckingSink sink(self, consumed);
    Fiber::ready();
    for (std::uint32_t round = 1; round <= 3; ++round) {
      sink.round = round;
      gradients.table->begin_round(early);
      if (early == EarlyWork::kConsume) gradients.table->consume_early(sink, self.size);
      gradients.publish(round);
      if (!finished(self, gradients.table->finish_consuming(&sink, self.size, false))) return;
      for (std::size_t i = 0; i < kCounts.size(); ++i)
        for (const int times : consumed[i])
          Fiber::check(times == static_cast<int>(round) - (i == 1 && round == 3 ? 1 : 0),
                       "an element was consumed " + std::to_string(times) + " times by round " + std::to_string(round));
      if (!finished(self, start_barrier(gradients.queue, counts, false))) return;
    }
  });
}

TEST(Schedules, ConsumedRounds) {
  for (const Options& options : kTwoAndThree) explore_consume_rounds(options, EarlyWork::kConsume);
}
TEST(Schedules, ConsumedRoundsInBatches) { explore_consume_rounds({.num_ranks = 3}, EarlyWork::kNone); }

/// A further thread of rank 0 aborts its transport in the middle; the other ranks are told later, as by their heartbeat
/// threads.
void explore_abort(std::int64_t count) {
  std::vector<std::shared_ptr<Transport>> transports;
  explore(
      {.num_ranks = 2},
      [&](Rank& self) {
        if (self.rank == 0) transports.assign(2, nullptr);
        const auto transport = self.transport("abort");
        transports[static_cast<std::size_t>(self.rank)] = transport;
        Fiber::ready();
        const at::Tensor tensor = self.tensor(count, 0);
        for (int n = 1; n <= 3; ++n) {
          tensor.fill_(n);
          const PendingPtr pending =
              transport->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor});
          pending->wait_until(Deadline::never());
          if (pending->error()) return;
          check_all(tensor, static_cast<float>(2 * n));
        }
        transports[static_cast<std::size_t>(self.rank)] = nullptr;
      },
      [&](Fiber&) {
        for (int rank = 0; rank < 2; ++rank) {
          Fiber::delay();
          Fiber::allow_timeouts();  // a thread that sleeps notices the abort after 20 ms
          if (const auto transport = transports.size() == 2 ? transports[static_cast<std::size_t>(rank)] : nullptr)
            transport->abort(std::make_exception_ptr(std::runtime_error("stop")));
        }
      });
  transports.clear();
}

TEST(Schedules, AbortInTheMiddle) {
  for (const std::int64_t count : {5, 700}) explore_abort(count);
}

}  // namespace
}  // namespace lockstep::schedules
