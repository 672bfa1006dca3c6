#include "lockstep/launch/supervise/rank_states.h"

#include <gtest/gtest.h>

#include <thread>

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

TEST(Observed, ARankThatLeavesHasReleasedTheOthers) {
  for (const bool by_its_end : {false, true}) {
    Observed observed(3, {.stall = 30s, .hang = 200ms});
    // Two have waited for the first, which works for long.
    observed.add(job::Pulse{.rank = 0, .idle = 10ms});
    observed.add(job::Pulse{.rank = 1, .idle = 20s});
    observed.add(job::Pulse{.rank = 2, .idle = 20s});
    EXPECT_FALSE(observed.find_stuck());
    // It leaves; what is known of the others is older.
    if (by_its_end)
      observed.ended(0);
    else
      observed.add(job::Pulse{.rank = 0, .idle = 10ms, .in_world = false});
    EXPECT_FALSE(observed.find_stuck());
    std::this_thread::sleep_for(210ms);
    observed.add(job::Pulse{.rank = 1, .idle = 20210ms});
    ASSERT_TRUE(observed.find_stuck());
    EXPECT_EQ(observed.find_stuck()->ranks, (std::vector<int>{1, 2}));
  }
}

TEST(Observed, WhoIsSilentIsStalledWhoeverLeaves) {
  Observed observed(2, {.stall = 30s, .hang = 300s});
  observed.add(job::Pulse{.rank = 0});
  observed.add(job::Pulse{.rank = 1, .silent = 31s});
  observed.ended(0);
  ASSERT_TRUE(observed.find_stuck());
  EXPECT_EQ(observed.find_stuck()->cause, base::Cause::kRankStalled);
}

}  // namespace
}  // namespace lockstep::launcher
