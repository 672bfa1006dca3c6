#include <gtest/gtest.h>

#include "lockstep/comm/reducers/bucket_plan.h"

namespace lockstep::comm::reducers {
namespace {

TEST(BucketSize, ChoosesSmallestSizeNearTheBestRate) {
  EXPECT_EQ(choose_bucket_bytes({{1000, 1.0}, {4000, 2.0}, {16000, 4.0}}), 16000);  // the rate doubles at each size
  EXPECT_EQ(choose_bucket_bytes({{1000, 1.0}, {4000, 3.0}, {16000, 11.0}}),
            4000);  // 1000, 1333 and 1455 bytes per second
  EXPECT_EQ(choose_bucket_bytes({{1000, 1.0}, {4000, 4.0}, {16000, 16.0}}), 1000);
  EXPECT_EQ(choose_bucket_bytes({{1000, 1.0}, {4000, 2.0}, {16000, 30.0}}), 4000);  // the rate rises and falls again
  EXPECT_EQ(choose_bucket_bytes({{1000, 1.0}}), 1000);
}

}  // namespace
}  // namespace lockstep::comm::reducers
