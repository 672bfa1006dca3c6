#include "lockstep/comm/hierarchy/host_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::comm::hierarchy {
namespace {

using ::testing::ElementsAre;

TEST(HostPlan, HostsAreNumberedInOrderOfTheirFirstMember) {
  const HostPlan contiguous = plan_hosts({5, 5, 9, 9});
  EXPECT_THAT(contiguous.hosts, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
  const HostPlan mixed = plan_hosts({9, 5, 9, 5});
  EXPECT_THAT(mixed.hosts, ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
  EXPECT_EQ(mixed.num_cross_host_groups, 2);
  EXPECT_THAT(mixed.cross_host_group(1), ElementsAre(2, 3));
  EXPECT_EQ(mixed.locations[2].host, 0);
  EXPECT_EQ(mixed.locations[2].local_rank, 1);
}

TEST(HostPlan, NumberOfCrossHostGroupsIsSmallestHostSize) {
  const HostPlan plan = plan_hosts({0, 0, 0, 1, 1, 2});
  EXPECT_EQ(plan.num_cross_host_groups, 1);
  EXPECT_EQ(plan.max_host_size, 3U);
  EXPECT_THAT(plan.cross_host_group(0), ElementsAre(0, 3, 5));
}

TEST(HostPlan, SlicesAreContiguousAndCoverAllElements) {
  for (const std::size_t count : {0U, 1U, 63U, 64U, 65U, 1000U, 12345U})
    for (const int num_groups : {1, 2, 3, 7}) {
      std::size_t next = 0;
      for (int cross_host_group = 0; cross_host_group < num_groups; ++cross_host_group) {
        const ElementRange slice = slice_of(count, num_groups, cross_host_group);
        EXPECT_EQ(slice.first, next);
        EXPECT_TRUE(slice.count == 0 || slice.first % 64 == 0);
        next = slice.first + slice.count;
      }
      EXPECT_EQ(next, count);
    }
}

}  // namespace
}  // namespace lockstep::comm::hierarchy
