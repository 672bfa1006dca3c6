#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher::supervise {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

const HostBackoff::Time kNow = HostBackoff::Time() + 1000h;

TEST(HostBackoff, AllHostsAreInitiallyAvailable) {
  const HostBackoff backoff(3);
  EXPECT_THAT(backoff.available(kNow), ElementsAre(0, 1, 2));
  EXPECT_LE(backoff.when_available(3), kNow);
}

TEST(HostBackoff, BackoffDoublesFromTenSeconds) {
  HostBackoff backoff(2);
  auto now = kNow;
  for (const auto pause : {10s, 20s, 40s, 80s, 160s, 320s, 600s, 600s}) {
    backoff.record_failure(1, now);
    EXPECT_THAT(backoff.available(now), ElementsAre(0));
    EXPECT_THAT(backoff.available(now + pause - 1ms), ElementsAre(0));
    EXPECT_THAT(backoff.available(now + pause), ElementsAre(0, 1));
    EXPECT_EQ(backoff.when_available(2), now + pause);
    EXPECT_LE(backoff.when_available(1), now);
    now += pause + 5s;
  }
}

TEST(HostBackoff, SuccessResetsTheBackoff) {
  HostBackoff backoff(1);
  backoff.record_failure(0, kNow);
  backoff.record_failure(0, kNow + 10s);
  EXPECT_EQ(backoff.when_available(1), kNow + 30s);
  backoff.record_success(0);
  EXPECT_LE(backoff.when_available(1), kNow);
  backoff.record_failure(0, kNow + 60s);
  EXPECT_EQ(backoff.when_available(1), kNow + 70s);
}

TEST(HostBackoff, EnoughHostsAreAvailableAfterTheKthBackoff) {
  HostBackoff backoff(3);
  backoff.record_failure(0, kNow);
  backoff.record_failure(1, kNow);
  backoff.record_failure(1, kNow + 10s);
  EXPECT_LE(backoff.when_available(1), kNow);
  EXPECT_EQ(backoff.when_available(2), kNow + 10s);
  EXPECT_EQ(backoff.when_available(3), kNow + 30s);
  EXPECT_EQ(backoff.when_available(9), kNow + 30s);  // there are only three
}

}  // namespace
}  // namespace lockstep::launcher::supervise
