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
      rank_states.add(
          job::health::RankHealth{.rank = 0, .since_progress = 10ms, .phase = job::health::RankPhase::kAfterWorld});
    EXPECT_FALSE(rank_states.find_hang());
    std::this_thread::sleep_for(210ms);
    rank_states.add(job::health::RankHealth{.rank = 1, .since_progress = 20210ms});
    if (!by_exit) rank_states.on_rank_exit(0);  // the end of its process is no second progress
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

/// Adds the reports of `count` windows of 30 looks and `steps` steps, in which the ranks' operations were pending in
/// these numbers of looks. Returns the ranks that were found, in the order of the windows.
std::vector<int> find_stragglers(RankStates& rank_states, const std::vector<int>& pending, int count, int steps = 30) {
  std::vector<int> found;
  for (int window = 0; window <= count; ++window) {
    for (int rank = 0; rank < static_cast<int>(pending.size()); ++rank) {
      rank_states.add(job::health::RankHealth{.rank = rank,
                                              .steps = window * steps,
                                              .looks = 1 + 30 * window,
                                              .pending_looks = window * pending[static_cast<std::size_t>(rank)]});
      if (const auto one = rank_states.find_straggler()) found.push_back(one->rank);
    }
  }
  return found;
}

TEST(RankStates, FindsTheRankForWhichOthersWait) {
  RankStates slow(3, {}), balanced(3, {}), evaluating(3, {}), two(2, {}), logging(3, {});
  EXPECT_EQ(find_stragglers(slow, {25, 2, 24}, 5), std::vector<int>{1});
  EXPECT_EQ(find_stragglers(balanced, {25, 20, 24}, 5), std::vector<int>{});
  EXPECT_EQ(find_stragglers(evaluating, {25, 2, 24}, 5, 1), std::vector<int>{}) << "without steps it is no straggler";
  EXPECT_EQ(find_stragglers(two, {29, 0}, 5), std::vector<int>{1});
  EXPECT_EQ(find_stragglers(logging, {30, 28, 30}, 5), std::vector<int>{}) << "ranks with a GPU run ahead of it";
}

TEST(RankStates, WithoutLooksThereIsNoStraggler) {
  RankStates rank_states(2, {});
  for (int i = 0; i < 200; ++i)
    for (int rank = 0; rank < 2; ++rank) {
      rank_states.add(job::health::RankHealth{.rank = rank, .steps = 30 * i});
      EXPECT_FALSE(rank_states.find_straggler());
    }
}

}  // namespace
}  // namespace lockstep::launcher::supervise
