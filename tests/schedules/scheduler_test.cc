// The scheduler itself: it finds bugs that it should find, and a seed repeats its schedule.
#include "tests/schedules/scheduler.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>

#include "lockstep/base/atomic.h"

namespace lockstep::schedules {
namespace {

/// Three ranks count in two operations instead of one.
Outcome count_badly(std::uint64_t seed) {
  base::Atomic<std::uint32_t> count{0};
  int done = 0;
  const auto body = [&](Fiber&) {
    Fiber::ready();
    for (int i = 0; i < 3; ++i) count.store(count.load() + 1);
    Fiber::check(++done < 3 || count.load() == 9, "an increment was lost");
  };
  return run(seed, {.num_ranks = 3, .length = 40}, {body, body, body}, [](int) {});
}

TEST(Scheduler, FindsALostUpdateAndRepeatsIt) {
  std::uint64_t found = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Outcome first = count_badly(seed), second = count_badly(seed);
    EXPECT_EQ(first.failure, second.failure);
    EXPECT_EQ(first.points, second.points);
    EXPECT_EQ(first.switches, second.switches);
    found += first.failure.empty() ? 0 : 1;
  }
  EXPECT_GT(found, 20u);
  EXPECT_LT(found, 200u);  // some schedules run one rank after the other
}

TEST(Scheduler, ReportsSleepersThatNobodyWakes) {
  base::Atomic<std::uint32_t> word{0};
  const auto body = [&](Fiber&) {
    Fiber::ready();
    while (word.load() == 0) base::futex_wait(word, 0, std::chrono::milliseconds(20));
  };
  EXPECT_NE(run(1, {.num_ranks = 2}, {body, body}, [](int) {}).failure.find("lost wake-up"), std::string::npos);
}

TEST(Scheduler, ReportsALoopWithoutEnd) {
  base::Atomic<std::uint32_t> word{0};
  const auto body = [&](Fiber&) {
    Fiber::ready();
    while (word.load() == 0) base::yield_thread();
  };
  EXPECT_NE(run(1, {.num_ranks = 2}, {body, body}, [](int) {}).failure.find("no end"), std::string::npos);
}

TEST(Scheduler, KillsOneRank) {
  int num_killed = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    base::Atomic<std::uint32_t> word{0};
    std::array<int, 2> steps{};
    const auto body = [&](Fiber& fiber) {
      Fiber::ready();
      for (int& step = steps[static_cast<std::size_t>(fiber.index)]; step < 20; ++step) word.fetch_add(1);
    };
    int told = -1;
    const Outcome outcome =
        run(seed, {.num_ranks = 2, .kill_one = true, .length = 60}, {body, body}, [&](int rank) { told = rank; });
    EXPECT_EQ(outcome.failure, "");
    EXPECT_EQ(told, outcome.killed);
    if (outcome.killed < 0) continue;
    ++num_killed;
    EXPECT_LT(steps[static_cast<std::size_t>(outcome.killed)], 20);
    EXPECT_EQ(steps[static_cast<std::size_t>(1 - outcome.killed)], 20);
  }
  EXPECT_GT(num_killed, 40);
}

}  // namespace
}  // namespace lockstep::schedules
