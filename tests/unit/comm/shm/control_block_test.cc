#include "lockstep/comm/shm/control_block.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "tests/unit/comm/shm/rank_threads_suite.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

class ControlBlockThreads : public RankThreadsSuite {};
INSTANTIATE_TEST_SUITE_P(Ranks, ControlBlockThreads, kAllSizesAndMappings, name_of);

TEST_P(ControlBlockThreads, CounterPublishesWhatWasWrittenBefore) {
  run([](RankThread& self) {
    const auto blocks = self.connect();
    for (std::uint32_t n = 1; n <= kRounds; ++n) {
      SharedCounter& own = blocks->own().published[n % 2];
      own.key = n * 100 + static_cast<std::uint64_t>(self.rank);
      std::memset(own.data, static_cast<int>(n % 100), sizeof own.data);
      std::memset(blocks->own().inline_data[n % 2], static_cast<int>(n % 100), kInlineBytes);
      blocks->advance(own, n);
      for (int peer = 0; peer < self.size; ++peer) {
        const SharedCounter& theirs = blocks->of(peer).published[n % 2];
        ASSERT_TRUE(blocks->wait(peer, theirs, n, Deadline::in(60s)));
        ASSERT_EQ(theirs.key, n * 100 + static_cast<std::uint64_t>(peer));
        ASSERT_EQ(theirs.data[n % sizeof theirs.data], static_cast<char>(n % 100));
        ASSERT_EQ(blocks->of(peer).inline_data[n % 2][n % kInlineBytes], static_cast<char>(n % 100));
      }
      // As in an operation that is complete after compute(): the element is written again only after the next one.
    }
  });
}

TEST_P(ControlBlockThreads, SleeperIsWoken) {
  run([](RankThread& self) {
    const auto blocks = self.connect();
    // Rank 0 advances only when all others sleep, so each of them needs the wake-up.
    if (self.rank != 0) {
      const auto began = std::chrono::steady_clock::now();
      ASSERT_TRUE(blocks->wait(0, blocks->of(0).completed, 1, Deadline::in(60s)));
      ASSERT_LT(std::chrono::steady_clock::now() - began, 30s);
      return;
    }
    for (int peer = 1; peer < self.size; ++peer)
      while (blocks->of(peer).num_sleepers.count.load() == 0) base::yield_thread();
    blocks->advance(blocks->own().completed, 1);
  });
}

TEST_P(ControlBlockThreads, WaitEndsAtDeadline) {
  run([](RankThread& self) {
    const auto blocks = self.connect();
    const int next = (self.rank + 1) % self.size;
    EXPECT_FALSE(blocks->wait(next, blocks->of(next).completed, 1, Deadline::in(5ms)));
    EXPECT_FALSE(blocks->wait(next, blocks->of(next).completed, 1, Deadline::in(0ms)));
    EXPECT_EQ(blocks->own().num_sleepers.count.load(), 0u);
  });
}

TEST(ControlBlocks, CountsWrapAround) {
  RankThreads(3, Mapping::kDistinct).run([](RankThread& self) {
    const auto blocks = self.connect();
    const std::uint32_t start = 0u - 3;
    for (std::uint32_t n = start; n != 4; ++n) {
      if (n == start) blocks->own().completed.count.store(start - 1);
      blocks->advance(blocks->own().completed, n);
      for (int peer = 0; peer < self.size; ++peer) {
        // 0, the initial value, counts as later than `start`.
        while (n == start && blocks->of(peer).completed.count.load() == 0) base::yield_thread();
        ASSERT_TRUE(blocks->wait(peer, blocks->of(peer).completed, n, Deadline::in(60s)));
      }
    }
  });
}

TEST(ControlBlocks, DeadPeerEndsTheWait) {
  RankThreads(3, Mapping::kShared).run([](RankThread& self) {
    const auto blocks = self.connect();
    if (self.rank == 2) {
      blocks->advance(blocks->own().completed, 1);
      return self.die();
    }
    EXPECT_TRUE(blocks->wait(2, blocks->of(2).completed, 1, Deadline::in(60s)));
    const auto wait = [&] {
      while (!blocks->wait(2, blocks->of(2).completed, 2, Deadline::in(20ms))) {
      }
    };
    EXPECT_THROW(wait(), std::runtime_error);
  });
}

/// Runs `function` in a thread that is bound to the first core of this process.
template <typename Function>
std::jthread on_first_core(const Function& function) {
  return std::jthread([&function] {
    cpu_set_t allowed, one;
    ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
    int core = 0;
    while (!CPU_ISSET(core, &allowed)) ++core;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    function();
  });
}

TEST(SpinPolicy, EndsSoonBesideABusyThread) {
  std::atomic<bool> ended = false;
  const auto compute = [&] {
    while (!ended) {
    }
  };
  std::chrono::steady_clock::duration time{};
  const auto wait = [&] {
    const SharedCounter never_advanced;
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(spin_until_reached(never_advanced, 1, SpinPolicy::for_shared_cores()));
    time = std::chrono::steady_clock::now() - begin;
    ended = true;
  };
  {
    const std::jthread busy = on_first_core(compute), waiting = on_first_core(wait);
  }
  EXPECT_LT(time, 2s);
}

}  // namespace
}  // namespace lockstep::comm::shm
