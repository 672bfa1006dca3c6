#include "lockstep/launch/supervise/host_backoff.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

const HostRest::Time kNow = HostRest::Time() + 1000h;

TEST(HostRest, AtFirstAllMayBeUsed) {
  const HostRest rest(3);
  EXPECT_THAT(rest.rested(kNow), ElementsAre(0, 1, 2));
  EXPECT_LE(rest.enough_at(3), kNow);
}

TEST(HostRest, OneThatFailsRestsTenSecondsAndThenTwiceAsLong) {
  HostRest rest(2);
  auto now = kNow;
  for (const auto pause : {10s, 20s, 40s, 80s, 160s, 320s, 600s, 600s}) {
    rest.failed(1, now);
    EXPECT_THAT(rest.rested(now), ElementsAre(0));
    EXPECT_THAT(rest.rested(now + pause - 1ms), ElementsAre(0));
    EXPECT_THAT(rest.rested(now + pause), ElementsAre(0, 1));
    EXPECT_EQ(rest.enough_at(2), now + pause);
    EXPECT_LE(rest.enough_at(1), now);
    now += pause + 5s;
  }
}

TEST(HostRest, OneThatHasServedIsAsGoodAsNew) {
  HostRest rest(1);
  rest.failed(0, kNow);
  rest.failed(0, kNow + 10s);
  EXPECT_EQ(rest.enough_at(1), kNow + 30s);
  rest.served(0);
  EXPECT_LE(rest.enough_at(1), kNow);
  rest.failed(0, kNow + 60s);
  EXPECT_EQ(rest.enough_at(1), kNow + 70s);
}

TEST(HostRest, EnoughIsWhenTheQuickestAreBack) {
  HostRest rest(3);
  rest.failed(0, kNow);
  rest.failed(1, kNow);
  rest.failed(1, kNow + 10s);
  EXPECT_LE(rest.enough_at(1), kNow);
  EXPECT_EQ(rest.enough_at(2), kNow + 10s);
  EXPECT_EQ(rest.enough_at(3), kNow + 30s);
  EXPECT_EQ(rest.enough_at(9), kNow + 30s);  // more there are not
}

}  // namespace
}  // namespace lockstep::launcher
