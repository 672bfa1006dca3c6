#include "lockstep/launch/hosts/network_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

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

TEST(NetworkPlan, AFewHostsCheckAllOthers) {
  EXPECT_THAT(checked_peers(0, 1), IsEmpty());
  EXPECT_THAT(checked_peers(2, 4), ElementsAre(0, 1, 3));
  for (std::size_t self = 0; self < 16; ++self) EXPECT_EQ(checked_peers(self, 16).size(), 15U);
}

TEST(NetworkPlan, EachOfManyHostsIsCheckedFromSeveralInBothDirections) {
  for (const std::size_t count : {17U, 32U, 33U, 128U, 1024U}) {
    std::map<std::size_t, std::set<std::size_t>> peers;
    for (std::size_t self = 0; self < count; ++self) {
      const std::vector<std::size_t> of_self = checked_peers(self, count);
      peers[self] = {of_self.begin(), of_self.end()};
      EXPECT_EQ(peers[self].size(), of_self.size()) << count;
      EXPECT_FALSE(peers[self].contains(self)) << count;
      EXPECT_EQ(of_self.size(), 4U) << count;
    }
    for (const auto& [self, of_self] : peers)
      for (const std::size_t peer : of_self)
        EXPECT_TRUE(peers[peer].contains(self)) << count << ": " << self << ", " << peer;
  }
}

TEST(NetworkPlan, UnknownHostsAreIgnored) { EXPECT_THAT(blocking_hosts({{{-1, "why"}, {2, "why"}}, {}}), IsEmpty()); }

}  // namespace
}  // namespace lockstep::launcher::hosts
