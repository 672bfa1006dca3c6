#include "lockstep/base/telemetry/comm_time.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace lockstep::base::telemetry {
namespace {

constexpr std::int64_t kMs = 1'000'000;

/// Keeps this thread busy for that time of the monotonic clock; returns the time that has really passed.
std::int64_t work_for(std::int64_t ns) {
  const std::int64_t begin = monotonic_ns();
  while (monotonic_ns() - begin < ns) std::this_thread::yield();
  return monotonic_ns() - begin;
}

template <typename Action>
std::int64_t counted(Action action) {
  const std::int64_t before = CommTime::total_ns();
  action();
  return CommTime::total_ns() - before;
}

TEST(CommTime, CountsScopesOnceAndWithoutPauses) {
  std::int64_t passed = 0;
  const std::int64_t time = counted([&] {
    const CommTime::Scope outer(true);
    passed = work_for(20 * kMs);
    {
      const CommTime::Scope inner(true);
      passed += work_for(20 * kMs);
    }
    const CommTime::Pause pause;
    work_for(20 * kMs);
  });
  EXPECT_NEAR(static_cast<double>(time), static_cast<double>(passed), 0.1 * static_cast<double>(passed));
}

TEST(CommTime, CountsWaitsInsideAPause) {
  std::int64_t passed = 0;
  const std::int64_t time = counted([&] {
    const CommTime::Scope scope(true);
    const CommTime::Pause pause;
    {
      const CommTime::Pause again;
      work_for(20 * kMs);
    }
    const CommTime::Scope waits(true);
    CommTime::add(std::int64_t{1} << 40);  // counted by the Scope
    passed = work_for(20 * kMs);
  });
  EXPECT_NEAR(static_cast<double>(time), static_cast<double>(passed), 0.2 * static_cast<double>(passed));
}

TEST(CommTime, DoesNotCountWhatWaitsForNobody) {
  const std::int64_t time = counted([] {
    const CommTime::Scope scope(false);
    const CommTime::Pause pause;
    work_for(10 * kMs);
  });
  EXPECT_NEAR(static_cast<double>(time), 0, kMs) << "its clocks are compared anew in each call";
}

TEST(CommTime, AddsIntervalsOfItsCaller) {
  std::int64_t passed = 0;
  const std::int64_t time = counted([&] {
    const std::int64_t begin = ticks();
    passed = work_for(20 * kMs);
    CommTime::add(ticks() - begin);
  });
  EXPECT_NEAR(static_cast<double>(time), static_cast<double>(passed), 0.1 * static_cast<double>(passed));
}

TEST(CommTime, IsOfTheCallingThread) {
  EXPECT_NEAR(static_cast<double>(counted([] {
                std::thread([] {
                  EXPECT_GE(counted([] {
                              const CommTime::Scope scope(true);
                              work_for(10 * kMs);
                            }),
                            9 * kMs);
                }).join();
              })),
              0, kMs);
}

}  // namespace
}  // namespace lockstep::base::telemetry
