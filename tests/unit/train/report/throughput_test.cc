#include "lockstep/train/report/throughput.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/train/report/rank_record.h"
#include "tests/support/temp_dir.h"

namespace lockstep::training {
namespace {

using ::testing::DoubleEq;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pair;
using tests::message_of;

/// Returns a step of 10 ms: 1 ms data, 3 ms forward in two spans, 4 ms backward, 1 ms optimizer, 1 ms outside of
/// phases.
StepTimes ten_ms_step() {
  constexpr std::int64_t ms = 1'000'000;
  return {.begin_ns = 0,
          .end_ns = 10 * ms,
          .spans = {{Phase::kData, 0, ms},
                    {Phase::kForward, ms, 2 * ms},
                    {Phase::kBackward, 2 * ms, 6 * ms},
                    {Phase::kForward, 6 * ms, 8 * ms},
                    {Phase::kOptimizer, 8 * ms, 9 * ms}}};
}

TEST(PhaseTimer, MeasuresPhases) {
  PhaseTimer timer;
  {
    const auto scope = timer.enter(Phase::kData);
  }
  {
    const auto scope = timer.enter(Phase::kForward);
  }
  {
    const auto scope = timer.enter(Phase::kForward);
  }
  const StepTimes first = timer.end_step();
  ASSERT_EQ(first.spans.size(), 3U);
  EXPECT_EQ(first.spans[2].phase, Phase::kForward);
  EXPECT_LE(first.begin_ns, first.spans[0].begin_ns);
  EXPECT_LE(first.spans[0].begin_ns, first.spans[0].end_ns);
  EXPECT_LE(first.spans[2].end_ns, first.end_ns);
  const StepTimes& second = timer.end_step();
  EXPECT_EQ(second.begin_ns, first.end_ns);
  EXPECT_TRUE(second.spans.empty());
}

TEST(PhaseTimer, ExcludesTimeBetweenSteps) {
  PhaseTimer timer;
  timer.end_step();
  const std::int64_t before = base::monotonic_ns();
  timer.begin_step();
  EXPECT_GE(timer.end_step().begin_ns, before);
}

TEST(PhaseTimer, IsCheap) {
  PhaseTimer timer;
  auto best = std::chrono::nanoseconds::max();
  for (int round = 0; round < 20; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int step = 0; step < 250; ++step) {
      for (const Phase phase : {Phase::kData, Phase::kForward, Phase::kBackward, Phase::kOptimizer})
        const auto scope = timer.enter(phase);
      timer.end_step();
    }
    best = std::min(
        best, std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin) / 250);
  }
  EXPECT_LT(best.count(), 3000) << "nanoseconds per step of four phases";
  RecordProperty("nanoseconds_per_step", static_cast<int>(best.count()));
}

TEST(StepTimes, SumPhases) {
  EXPECT_THAT(ten_ms_step().phase_seconds(),
              ElementsAre(DoubleEq(0.001), DoubleNear(0.003, 1e-12), DoubleEq(0.004), DoubleEq(0.001)));
  EXPECT_DOUBLE_EQ(ten_ms_step().seconds(), 0.01);
}

TEST(Throughput, AveragesOverTheWindow) {
  Throughput throughput({.window = 2, .flops_per_step = 5e9, .peak_flops = 1e12});
  EXPECT_EQ(throughput.rates().steps_per_second, 0);
  StepTimes slow;
  slow.end_ns = 1'000'000'000;
  throughput.add(slow, 1);
  throughput.add(ten_ms_step(), 64);
  EXPECT_NEAR(throughput.rates().steps_per_second, 2 / 1.01, 1e-9);
  throughput.add(ten_ms_step(), 32);
  const Rates rates = throughput.rates();
  EXPECT_NEAR(rates.steps_per_second, 100, 1e-9);
  EXPECT_NEAR(rates.samples_per_second, 4800, 1e-9);
  EXPECT_NEAR(rates.phase_fractions[1], 0.3, 1e-9);
  EXPECT_NEAR(rates.mfu, 0.5, 1e-9);
}

TEST(Throughput, NamesItsValues) {
  Throughput throughput({});
  throughput.add(ten_ms_step(), 1);
  const auto near = [](double value) { return DoubleNear(value, 1e-9); };
  EXPECT_THAT(
      throughput.values(),
      ElementsAre(Pair("throughput/steps_per_second", near(100)), Pair("throughput/samples_per_second", near(100)),
                  Pair("time/data", near(0.1)), Pair("time/forward", near(0.3)), Pair("time/backward", near(0.4)),
                  Pair("time/optimizer", near(0.1)), Pair("time/other", near(0.1))));
}

TEST(Throughput, NamesTheTimeBetweenRanksIfAsked) {
  Throughput throughput({.comm = true});
  StepTimes times = ten_ms_step();
  times.comm_ns = 2'500'000;
  throughput.add(times, 1);
  EXPECT_THAT(throughput.values(), testing::Contains(Pair("time/comm", DoubleNear(0.25, 1e-9))));
}

TEST(Throughput, RejectsInvalidOptions) {
  EXPECT_EQ(message_of<base::UsageError>([] { Throughput({.window = 0}); }),
            "ThroughputOptions: window is 0; expected 1 or more");
  EXPECT_EQ(message_of<base::UsageError>([] { Throughput({.peak_flops = 1}); }),
            "ThroughputOptions: flops_per_step is 0.000000, peak_flops is 1.000000; expected both above 0, or both 0");
  EXPECT_NE(message_of<base::UsageError>([] { Throughput({.flops_per_step = NAN, .peak_flops = 1}); }), "");
}

TEST(ResourceUsage, GrowsWithUse) {
  const ResourceUsage before = ResourceUsage::now();
  std::vector<char> memory(32 << 20, 1);
  volatile double sum = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (std::chrono::steady_clock::now() < end) sum = sum + memory[static_cast<std::size_t>(sum) % memory.size()];
  const ResourceUsage after = ResourceUsage::now();
  EXPECT_GT(after.cpu_seconds, before.cpu_seconds);
  EXPECT_GT(after.resident_bytes, before.resident_bytes + (24 << 20));
  EXPECT_GE(after.peak_resident_bytes, after.resident_bytes);
}

}  // namespace
}  // namespace lockstep::training
