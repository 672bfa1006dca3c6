#include "lockstep/base/deadline.h"

#include <gtest/gtest.h>

namespace lockstep::base {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, ExpiresUnlessNever) {
  EXPECT_TRUE(Deadline::in(0s).expired());
  EXPECT_TRUE(Deadline::in(-1h).expired());
  EXPECT_FALSE(Deadline::in(1h).expired());
  EXPECT_FALSE(Deadline::never().expired());
  EXPECT_TRUE(Deadline::never().is_never());
  EXPECT_FALSE(Deadline::in(1h).is_never());
}

TEST(Deadline, HugeLimitsDoNotOverflow) {
  EXPECT_TRUE(Deadline::in(std::chrono::hours::max()).is_never());
  EXPECT_TRUE(Deadline::in(std::chrono::milliseconds::max()).is_never());
  EXPECT_TRUE(Deadline::in(std::chrono::seconds::max()).is_never());
  EXPECT_FALSE(Deadline::in(std::chrono::hours(24 * 3649)).is_never());
}

TEST(Deadline, RemainingTimeIsNeverNegative) {
  EXPECT_EQ(Deadline::in(-5s).remaining(), 0ms);
  EXPECT_GT(Deadline::in(1h).remaining(), 59min);
  EXPECT_LE(Deadline::in(1h).remaining(), 1h);
  EXPECT_EQ(Deadline::never().remaining(), std::chrono::milliseconds::max());
  EXPECT_GT(Deadline::in(100us).remaining(), 0ms);  // rounded up, so that poll(2) does not spin
}

TEST(Deadline, PollMsIsCapped) {
  EXPECT_EQ(Deadline::never().poll_ms(), 60000);
  EXPECT_EQ(Deadline::in(1h).poll_ms(250ms), 250);
  EXPECT_EQ(Deadline::in(-1s).poll_ms(), 0);
}

TEST(Deadline, EarlierOfTwoDeadlines) {
  const Deadline soon = Deadline::in(1s);
  EXPECT_EQ(earlier(soon, Deadline::never()).when(), soon.when());
  EXPECT_EQ(earlier(Deadline::never(), soon).when(), soon.when());
  EXPECT_EQ(earlier(Deadline::in(1h), soon).when(), soon.when());
}

}  // namespace
}  // namespace lockstep::base
