#include "lockstep/job/health/rank_health.h"

#include <gtest/gtest.h>

namespace lockstep::job::health {
namespace {

using namespace std::chrono_literals;

constexpr RankPhase kBefore = RankPhase::kBeforeWorld, kLeft = RankPhase::kAfterWorld;
const HealthLimits kLimits{.stall = 30s, .hang = 300s};

std::vector<int> ranks_of(const std::optional<HangFinding>& finding, HangKind kind) {
  if (!finding) return {};
  EXPECT_EQ(finding->kind, kind);
  return finding->ranks;
}

TEST(RankHealth, StallTimerCountsFromTheLastChange) {
  const auto start = StallTimer::Clock::now();
  StallTimer timer;
  timer.sample(0, start);
  EXPECT_EQ(timer.stalled_for(start + 2s), 2s);
  timer.sample(0, start + 3s);
  EXPECT_EQ(timer.stalled_for(start + 4s), 4s);
  timer.sample(1, start + 5s);
  EXPECT_EQ(timer.stalled_for(start + 7s), 2s);
}

TEST(RankHealth, StallTimerSkipsSamplingGaps) {
  const auto start = StallTimer::Clock::now();
  StallTimer timer;
  timer.sample(7, start);
  timer.sample(7, start + 2s);
  timer.sample(7, start + 1002s);  // the machine was suspended
  EXPECT_EQ(timer.stalled_for(start + 1003s), 3s);
}

TEST(RankHealth, SilentRankIsStalled) {
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 0s}, {1, 29s, 29s}}, 2, kLimits), HangKind::kStall), std::vector<int>{});
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 0s}, {1, 30s, 30s}}, 2, kLimits), HangKind::kStall), std::vector<int>{1});
  EXPECT_EQ(ranks_of(find_hang({{0, 30s, 0s}}, 1, kLimits), HangKind::kStall), std::vector<int>{0});
}

TEST(RankHealth, NoHangWhileOneMakesProgress) {
  EXPECT_FALSE(find_hang({{0, 0s, 299s}, {1, 0s, 5000s}}, 2, kLimits));
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 300s}, {1, 0s, 5000s}}, 2, kLimits), HangKind::kHang),
            (std::vector<int>{0, 1}));
}

TEST(RankHealth, RanksThatLeftAreIgnored) {
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 300s}, {1, 0s, 0s, kLeft}, {2, 0s, 301s}}, 3, kLimits), HangKind::kHang),
            (std::vector<int>{0, 2}));
  EXPECT_FALSE(
      find_hang({{0, 0s, 300s}, {1, 0s, 0s, kLeft}}, 2, kLimits));  // the last rank in the world has no time limit
}

TEST(RankHealth, RanksThatHaveLeftAndDoNotEndAreJudgedOnceNoRankIsInTheWorld) {
  EXPECT_FALSE(find_hang({{0, 0s, 299s, kLeft}, {1, 0s, 900s, kLeft}}, 2, kLimits));
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 300s, kLeft}, {1, 0s, 900s, kLeft}}, 2, kLimits), HangKind::kHang),
            (std::vector<int>{0, 1}));
  EXPECT_EQ(ranks_of(find_hang({{1, 0s, 300s, kLeft}}, 2, kLimits), HangKind::kHang), std::vector<int>{1});
  HealthLimits limits = kLimits;
  limits.work = 1800s;
  RankHealth works{.rank = 1, .phase = kLeft, .since_report = 1799s};
  EXPECT_FALSE(find_hang({works}, 2, limits));
  works.since_report = 1800s;
  EXPECT_EQ(ranks_of(find_hang({works}, 2, limits), HangKind::kWork), std::vector<int>{1});
  EXPECT_FALSE(find_hang({works}, 1, limits));
}

TEST(RankHealth, RankThatHasNotJoinedIsJudgedWhileOthersWait) {
  const auto rank = [](int number, std::chrono::milliseconds time, RankPhase phase, bool is_waiting) {
    return RankHealth{.rank = number, .since_progress = time, .phase = phase, .is_waiting = is_waiting};
  };
  EXPECT_FALSE(find_hang({rank(0, 900s, RankPhase::kInWorld, true), rank(1, 10s, kBefore, false)}, 2, kLimits));
  EXPECT_EQ(ranks_of(find_hang({rank(0, 900s, RankPhase::kInWorld, true), rank(1, 300s, kBefore, false)}, 2, kLimits),
                     HangKind::kHang),
            (std::vector<int>{0, 1}));
  EXPECT_FALSE(find_hang({rank(0, 900s, kBefore, false), rank(1, 900s, kBefore, false)}, 2, kLimits));
}

TEST(RankHealth, WorldSizeOneCannotHang) { EXPECT_FALSE(find_hang({{0, 0s, 5000s}}, 1, kLimits)); }

TEST(RankHealth, ExplicitLimitAppliesToTheLastRank) {
  HealthLimits limits = kLimits;
  limits.judge_last_rank = true;
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 300s}}, 1, limits), HangKind::kHang), std::vector<int>{0});
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 300s}, {1, 0s, 0s, kLeft}}, 2, limits), HangKind::kHang), std::vector<int>{0});
  EXPECT_FALSE(find_hang({{0, 0s, 299s}}, 1, limits));
  EXPECT_EQ(ranks_of(find_hang({{0, 0s, 900s, kLeft}}, 1, limits), HangKind::kHang), std::vector<int>{0});
}

RankHealth working(int rank, std::chrono::milliseconds since_report, bool is_waiting) {
  return {.rank = rank, .since_report = since_report, .is_waiting = is_waiting};
}

TEST(RankHealth, RankThatWorksForTooLongWhileAnotherWaits) {
  HealthLimits limits = kLimits;
  limits.work = 1800s;
  EXPECT_FALSE(find_hang({working(0, 1799s, false), working(1, 5000s, true)}, 2, limits));
  EXPECT_EQ(ranks_of(find_hang({working(0, 1800s, false), working(1, 0s, true)}, 2, limits), HangKind::kWork),
            std::vector<int>{0});
  EXPECT_FALSE(find_hang({working(0, 1800s, false), working(1, 0s, false)}, 2, limits));  // nobody waits for it
  EXPECT_FALSE(find_hang({working(0, 1800s, true), working(1, 0s, true)}, 2, limits));
  limits.work = 0s;
  EXPECT_FALSE(find_hang({working(0, 5000s, false), working(1, 0s, true)}, 2, limits));
}

TEST(RankHealth, NoProcessUsesCpuTime) {
  const auto idle = [](int rank, std::chrono::milliseconds time) {
    return RankHealth{.rank = rank, .phase = RankPhase::kAfterWorld, .since_activity = time};
  };
  HealthLimits limits = kLimits;
  EXPECT_FALSE(find_hang({idle(0, 900s), idle(1, 900s)}, 2, limits));
  limits.idle = 60s;
  EXPECT_FALSE(find_hang({idle(0, 59s), idle(1, 900s)}, 2, limits));
  EXPECT_EQ(ranks_of(find_hang({idle(0, 60s), idle(1, 900s)}, 2, limits), HangKind::kIdle), (std::vector<int>{0, 1}));
  EXPECT_EQ(ranks_of(find_hang({idle(0, 60s)}, 1, limits), HangKind::kIdle), std::vector<int>{0});
}

TEST(RankHealth, ZeroLimitDisablesDetection) {
  EXPECT_FALSE(find_hang({{0, 5000s, 5000s}, {1, 5000s, 5000s}}, 2, {.stall = 0s, .hang = 0s}));
  EXPECT_FALSE(find_hang({}, 2, kLimits));
}

}  // namespace
}  // namespace lockstep::job::health
