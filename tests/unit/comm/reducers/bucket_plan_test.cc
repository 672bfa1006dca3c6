#include "lockstep/comm/reducers/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lockstep::comm::reducers {
namespace {

using ::testing::ElementsAre;
using Buckets = std::vector<std::vector<std::size_t>>;

TEST(BucketPlan, FirstBucketUsesTheFirstCap) {
  const std::vector<GradientSize> gradients(7, GradientSize{10, 0});
  EXPECT_EQ(plan_buckets(gradients, {6, 5, 4, 3, 2, 1, 0}, {10, 30}), (Buckets{{6}, {5, 4, 3}, {2, 1, 0}}));
  EXPECT_EQ(plan_buckets(gradients, {6, 5, 4, 3, 2, 1, 0}, {10, 25}), (Buckets{{6}, {5, 4, 3}, {2, 1, 0}}));
  EXPECT_EQ(plan_buckets(gradients, {0, 1}, {100, 100}), (Buckets{{0, 1}}));
  EXPECT_EQ(plan_buckets(gradients, {}, {10, 30}), Buckets{});
  EXPECT_EQ(plan_buckets(gradients, {3, 1}, {1}), (Buckets{{3}, {1}}));
}

TEST(BucketPlan, DtypesAreSeparateAndBucketsAreInOrderOfCompletion) {
  const std::vector<GradientSize> gradients = {{10, 0}, {10, 1}, {10, 0}, {10, 1}, {10, 0}};
  // Gradient 2 fills the bucket of kind 0 before gradient 3 fills that of kind 1.
  EXPECT_EQ(plan_buckets(gradients, {0, 1, 2, 3, 4}, {20, 20}), (Buckets{{0, 2}, {1, 3}, {4}}));
  EXPECT_EQ(plan_buckets(gradients, {1, 0, 3, 2, 4}, {20, 20}), (Buckets{{1, 3}, {0, 2}, {4}}));
}

TEST(BucketPlan, LargeGradientGetsItsOwnBucket) {
  EXPECT_EQ(plan_buckets({{1000, 0}, {1, 0}, {1, 0}}, {0, 1, 2}, {10, 10}), (Buckets{{0}, {1, 2}}));
}

TEST(BucketPlan, InvariantsHoldForRandomSizes) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<GradientSize> gradients(random() % 40);
    for (GradientSize& gradient : gradients)
      gradient = {static_cast<std::int64_t>(random() % 50), static_cast<int>(random() % 3)};
    std::vector<std::size_t> order(gradients.size());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(order.size() - order.size() / 4);
    const std::vector<std::int64_t> caps = {static_cast<std::int64_t>(random() % 30),
                                            static_cast<std::int64_t>(random() % 90)};
    std::vector<std::size_t> position(gradients.size());
    for (std::size_t i = 0; i < order.size(); ++i) position[order[i]] = i;
    std::vector<std::size_t> all;
    std::size_t last_end = 0;
    for (const auto& bucket : plan_buckets(gradients, order, caps)) {
      ASSERT_FALSE(bucket.empty());
      std::int64_t before_last = 0;
      for (std::size_t i = 0; i < bucket.size(); ++i) {
        EXPECT_EQ(gradients[bucket[i]].kind, gradients[bucket[0]].kind);
        if (i > 0) {
          EXPECT_LT(position[bucket[i - 1]], position[bucket[i]]);
        }
        if (i + 1 < bucket.size()) before_last += gradients[bucket[i]].bytes;
      }
      EXPECT_LT(before_last, std::max<std::int64_t>(1, std::max(caps[0], caps[1])))
          << "the bucket was full before its last gradient";
      EXPECT_GE(position[bucket.back()], last_end);
      last_end = position[bucket.back()];
      all.insert(all.end(), bucket.begin(), bucket.end());
    }
    std::sort(all.begin(), all.end());
    std::sort(order.begin(), order.end());
    EXPECT_EQ(all, order);
  }
}

TEST(MergeOrders, RankZeroFirstThenUnseenOfOthers) {
  EXPECT_THAT(merge_orders({{2, 0}, {0, 1, 2}, {3}}, 4), ElementsAre(2, 0, 1, 3));
  EXPECT_THAT(merge_orders({{}, {1}}, 2), ElementsAre(1));
  EXPECT_THAT(merge_orders({{0, 0, 9}}, 2), ElementsAre(0));
  EXPECT_TRUE(merge_orders({}, 3).empty());
}

}  // namespace
}  // namespace lockstep::comm::reducers
