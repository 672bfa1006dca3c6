#include "lockstep/launch/supervise/rank_states.h"

#include <gtest/gtest.h>

#include <thread>

namespace lockstep::launcher::supervise {
namespace {

using namespace std::chrono_literals;

TEST(RankStates, LeavingRankCountsAsProgress) {
  for (const bool by_exit : {false, true}) {
    RankStates rank_states(3, {.stall = 30s, .hang = 200ms});
    // Ranks 1 and 2 have waited for rank 0, which computes for a long time.
    rank_states.add(job::health::RankHealth{.rank = 0, .since_progress = 10ms});
    rank_states.add(job::health::RankHealth{.rank = 1, .since_progress = 20s});
    rank_states.add(job::health::RankHealth{.rank = 2, .since_progress = 20s});
    EXPECT_FALSE(rank_states.find_hang());
    // Rank 0 leaves. The other ranks have not reported since.
    if (by_exit)
      rank_states.on_rank_exit(0);
    else
      rank_states.add(job::health::RankHealth{.rank = 0, .since_progress = 10ms, .is_in_world = false});
    EXPECT_FALSE(rank_states.find_hang());
    std::this_thread::sleep_for(210ms);
    rank_states.add(job::health::RankHealth{.rank = 1, .since_progress = 20210ms});
    ASSERT_TRUE(rank_states.find_hang());
    EXPECT_EQ(rank_states.find_hang()->ranks, (std::vector<int>{1, 2}));
  }
}

TEST(RankStates, SilentRankIsStalledAfterAnotherRankLeaves) {
  RankStates rank_states(2, {.stall = 30s, .hang = 300s});
  rank_states.add(job::health::RankHealth{.rank = 0});
  rank_states.add(job::health::RankHealth{.rank = 1, .since_heartbeat = 31s});
  rank_states.on_rank_exit(0);
  ASSERT_TRUE(rank_states.find_hang());
  EXPECT_EQ(rank_states.find_hang()->cause(), base::Cause::kRankStalled);
}

}  // namespace
}  // namespace lockstep::launcher::supervise
