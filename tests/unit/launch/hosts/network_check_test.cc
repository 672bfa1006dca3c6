#include "lockstep/launch/hosts/network_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::launcher::hosts {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Failures = std::vector<std::vector<protocol::ProbeFailure>>;

TEST(NetworkPlan, NoHostBlocksAConnectedNetwork) { EXPECT_THAT(blocking_hosts(Failures(3)), IsEmpty()); }

TEST(NetworkPlan, LaterOfTwoHostsBlocks) {
  EXPECT_THAT(blocking_hosts({{{1, "why"}}, {}, {}}), ElementsAre(1));
  EXPECT_THAT(blocking_hosts({{}, {{0, "why"}}, {}}), ElementsAre(1));
  EXPECT_THAT(blocking_hosts({{{1, "why"}}, {{0, "why"}}}), ElementsAre(1));
}

TEST(NetworkPlan, UnreachableHostBlocks) {
  EXPECT_THAT(blocking_hosts({{}, {{0, "why"}}, {{0, "why"}}}), ElementsAre(0));
  EXPECT_THAT(blocking_hosts({{{1, "why"}, {2, "why"}, {3, "why"}}, {}, {}, {{2, "why"}}}), ElementsAre(0, 3));
}

TEST(NetworkPlan, UnknownHostsAreIgnored) { EXPECT_THAT(blocking_hosts({{{-1, "why"}, {2, "why"}}, {}}), IsEmpty()); }

}  // namespace
}  // namespace lockstep::launcher::hosts
