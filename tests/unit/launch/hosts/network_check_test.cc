#include "lockstep/launch/protocol/network_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Failures = std::vector<std::vector<ProbeFailure>>;

TEST(Meeting, NobodyIsInTheWayOfHostsThatMeet) { EXPECT_THAT(who_is_in_the_way(Failures(3)), IsEmpty()); }

TEST(Meeting, OfTwoTheLater) {
  EXPECT_THAT(who_is_in_the_way({{{1, "why"}}, {}, {}}), ElementsAre(1));
  EXPECT_THAT(who_is_in_the_way({{}, {{0, "why"}}, {}}), ElementsAre(1));
  EXPECT_THAT(who_is_in_the_way({{{1, "why"}}, {{0, "why"}}}), ElementsAre(1));
}

TEST(Meeting, TheOneThatNobodyReaches) {
  EXPECT_THAT(who_is_in_the_way({{}, {{0, "why"}}, {{0, "why"}}}), ElementsAre(0));
  EXPECT_THAT(who_is_in_the_way({{{1, "why"}, {2, "why"}, {3, "why"}}, {}, {}, {{2, "why"}}}), ElementsAre(0, 3));
}

TEST(Meeting, HostsThatAreNotThereDoNotCount) {
  EXPECT_THAT(who_is_in_the_way({{{-1, "why"}, {2, "why"}}, {}}), IsEmpty());
}

}  // namespace
}  // namespace lockstep::launcher
