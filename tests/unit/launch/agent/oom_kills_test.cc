#include <gtest/gtest.h>

#include "lockstep/launch/agent/rank_monitor.h"

namespace lockstep::launcher::agent {
namespace {

TEST(OomKills, ParsesKernelCounters) {
  EXPECT_EQ(parse_oom_kills("low 0\noom 5\noom_kill 3\noom_group_kill 1\n"), 3);
  EXPECT_EQ(parse_oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 2"), 2);
  EXPECT_EQ(parse_oom_kills(""), 0);
  EXPECT_EQ(parse_oom_kills("oom_kill x"), 0);
  EXPECT_GE(count_oom_kills(), 0);
}

}  // namespace
}  // namespace lockstep::launcher::agent
