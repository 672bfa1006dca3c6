#include "lockstep/job/health/straggler_detector.h"

#include <gtest/gtest.h>

namespace lockstep::job::health {
namespace {

/// Adds `count` windows with these times. Returns the reports as "rank:window".
std::string reports(StragglerDetector& stragglers, const std::vector<std::uint32_t>& work_us, int count) {
  std::string text;
  for (int window = 1; window <= count; ++window)
    for (int i = 0; i < 20; ++i)
      if (const auto found = stragglers.add(work_us))
        text += std::to_string(found->rank) + ":" + std::to_string(window) + " ";
  return text;
}

TEST(StragglerDetector, ReportsOnceAfterThreeSlowWindows) {
  StragglerDetector stragglers(4);
  EXPECT_EQ(reports(stragglers, {50000, 50000, 160000, 50000}, 10), "2:3 ");
}

TEST(StragglerDetector, IgnoresSmallerSlowdowns) {
  StragglerDetector stragglers(4);
  EXPECT_EQ(reports(stragglers, {50000, 50000, 140000, 50000}, 10), "");
}

TEST(StragglerDetector, FastWindowResetsTheCount) {
  StragglerDetector stragglers(3);
  EXPECT_EQ(reports(stragglers, {50000, 160000, 50000}, 2), "");
  EXPECT_EQ(reports(stragglers, {50000, 50000, 50000}, 1), "");
  EXPECT_EQ(reports(stragglers, {50000, 160000, 50000}, 2), "");
  EXPECT_EQ(reports(stragglers, {50000, 160000, 50000}, 1), "1:1 ");
}

TEST(StragglerDetector, DetectsOneOfTwoRanks) {
  StragglerDetector stragglers(2);
  EXPECT_EQ(reports(stragglers, {200000, 50000}, 3), "0:3 ");
}

TEST(StragglerDetector, IgnoresWindowsShorterThanASecond) {
  StragglerDetector stragglers(2);
  EXPECT_EQ(reports(stragglers, {10, 100}, 100), "");
}

TEST(StragglerDetector, SingleRankIsNeverReported) {
  StragglerDetector stragglers(1);
  EXPECT_EQ(reports(stragglers, {500000}, 9), "");
}

TEST(StragglerDetector, WarningHasSlowdownAndWaitShare) {
  StragglerDetector stragglers(3);
  std::optional<Straggler> found;
  for (int i = 0; i < 60; ++i)
    if (const auto one = stragglers.add({50000, 50000, 200000})) found = one;
  ASSERT_TRUE(found);
  Fatal warning = warning_of(*found, 7);
  warning.gen = 2;
  warning.step = 60;
  EXPECT_EQ(
      format_warning(warning),
      "WARN cause=STRAGGLER rank=7 host=- pid=- gen=2 step=60 op=- detail=\"it takes 4.0 times as long as the median "
      "rank, and the other ranks wait for it 75 % of the time\" hint=\"look for other work on its cores, a slower "
      "machine or larger batches there; the job continues\"");
}

}  // namespace
}  // namespace lockstep::job::health
