#include "lockstep/job/injection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::job {
namespace {

TEST(Injection, ParsesFaultRankAndStep) {
  const Injection injection = parse_injection("--inject", "flip@rank=3,step=40");
  EXPECT_EQ(injection.fault, Fault::kFlip);
  EXPECT_EQ(injection.rank, 3);
  EXPECT_EQ(injection.step, 40);
}

TEST(Injection, InvalidTextIsRejected) {
  for (const char* bad : {"", "kill", "kill@", "kill@rank=1", "kill@step=1,rank=1", "kill@rank=-1,step=1",
                          "kill@rank=1,step=0", "kill@rank=1,step=x", "Kill@rank=1,step=1", "kill@rank=1,step=1,step=2",
                          "@rank=1,step=1", "kill@rank=1,step=99999999999999999999", "kill@rank=,step=1"})
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { parse_injection("--inject", bad); }),
                ::testing::StartsWith("--inject is \"" + std::string(bad) + "\"; expected KIND@rank=R,step=S"))
        << bad;
}

}  // namespace
}  // namespace lockstep::job
