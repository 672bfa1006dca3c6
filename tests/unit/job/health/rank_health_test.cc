#include "lockstep/job/health/rank_health.h"

#include <gtest/gtest.h>

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Cause;

const PulseLimits kLimits{.stall = 30s, .hang = 300s};

std::vector<int> ranks_of(const std::optional<Finding>& finding, Cause cause) {
  if (!finding) return {};
  EXPECT_EQ(finding->cause, cause);
  return finding->ranks;
}

TEST(Pulse, StandsStillSinceItsLastChange) {
  const auto start = StandingStill::Clock::now();
  StandingStill count;
  count.look(0, start);
  EXPECT_EQ(count.lasts(start + 2s), 2s);
  count.look(0, start + 3s);
  EXPECT_EQ(count.lasts(start + 4s), 4s);
  count.look(1, start + 5s);
  EXPECT_EQ(count.lasts(start + 7s), 2s);
}

TEST(Pulse, TimeInWhichNobodyLookedDoesNotCount) {
  const auto start = StandingStill::Clock::now();
  StandingStill count;
  count.look(7, start);
  count.look(7, start + 2s);
  count.look(7, start + 1002s);  // all were frozen
  EXPECT_EQ(count.lasts(start + 1003s), 3s);
}

TEST(Pulse, WhoIsSilentIsStalledWhateverTheOthersDo) {
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 0s}, {1, 29s, 29s}}, 2, kLimits), Cause::kRankStalled), std::vector<int>{});
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 0s}, {1, 30s, 30s}}, 2, kLimits), Cause::kRankStalled), std::vector<int>{1});
  EXPECT_EQ(ranks_of(find_stuck({{0, 30s, 0s}}, 1, kLimits), Cause::kRankStalled), std::vector<int>{0});
}

TEST(Pulse, NobodyIsStuckWhileOneGetsOn) {
  EXPECT_FALSE(find_stuck({{0, 0s, 299s}, {1, 0s, 5000s}}, 2, kLimits));
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 300s}, {1, 0s, 5000s}}, 2, kLimits), Cause::kRankStuck),
            (std::vector<int>{0, 1}));
}

TEST(Pulse, WhoHasLeftNeitherHoldsUpNorGetsOn) {
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 300s}, {1, 0s, 0s, false}, {2, 0s, 301s}}, 3, kLimits), Cause::kRankStuck),
            (std::vector<int>{0, 2}));
  EXPECT_FALSE(
      find_stuck({{0, 0s, 300s}, {1, 0s, 0s, false}}, 2, kLimits));  // the last one may work as long as it likes
  EXPECT_FALSE(find_stuck({{0, 0s, 900s, false}, {1, 0s, 900s, false}}, 2, kLimits));
}

TEST(Pulse, AWorldOfOneWaitsForNobody) { EXPECT_FALSE(find_stuck({{0, 0s, 5000s}}, 1, kLimits)); }

TEST(Pulse, ALimitThatSomebodyAskedForCountsForTheLastOneToo) {
  PulseLimits asked = kLimits;
  asked.also_alone = true;
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 300s}}, 1, asked), Cause::kRankStuck), std::vector<int>{0});
  EXPECT_EQ(ranks_of(find_stuck({{0, 0s, 300s}, {1, 0s, 0s, false}}, 2, asked), Cause::kRankStuck),
            std::vector<int>{0});
  EXPECT_FALSE(find_stuck({{0, 0s, 299s}}, 1, asked));
  EXPECT_FALSE(find_stuck({{0, 0s, 900s, false}}, 1, asked));
}

TEST(Pulse, NoLimitNoFinding) {
  EXPECT_FALSE(find_stuck({{0, 5000s, 5000s}, {1, 5000s, 5000s}}, 2, {.stall = 0s, .hang = 0s}));
  EXPECT_FALSE(find_stuck({}, 2, kLimits));
}

}  // namespace
}  // namespace lockstep::job
