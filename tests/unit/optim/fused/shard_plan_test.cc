// Tests that shards partition all elements evenly.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lockstep/optim/fused/state_sharding.h"

namespace lockstep::optim {
namespace {

std::size_t bytes(const std::vector<StateSize>& parameters, const std::vector<ElementRange>& ranges) {
  std::size_t sum = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) sum += ranges[i].count * parameters[i].bytes_each;
  return sum;
}

/// Checks that each element has exactly one owner and that ranges are in order.
void expect_complete_partition(const std::vector<StateSize>& parameters, int num_owners) {
  std::vector<std::size_t> next(parameters.size());
  for (int owner = 0; owner < num_owners; ++owner) {
    const auto ranges = plan_shard(parameters, owner, num_owners);
    ASSERT_EQ(ranges.size(), parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(ranges[i].first, next[i]) << owner << " " << i;
      next[i] += ranges[i].count;
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(next[i], parameters[i].elements);
}

TEST(ShardPlan, EveryElementHasOneOwner) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<StateSize> parameters;
    for (unsigned i = 0; i < 1 + random() % 12; ++i)
      parameters.push_back({random() % 3 == 0 ? random() % 5 : random() % 100000, random() % 2 == 0 ? 4U : 8U});
    for (const int owners : {1, 2, 3, 4, 7, 64}) expect_complete_partition(parameters, owners);
  }
}

TEST(ShardPlan, ShardsDifferByAtMostOneCacheLineForEachParameter) {
  const std::vector<StateSize> parameters = {{1000003, 4}, {64, 4}, {500000, 8}, {1, 4}};
  const std::size_t all = 1000003 * 4 + 64 * 4 + 500000 * 8 + 4;
  for (const int owners : {2, 3, 4, 7})
    for (int owner = 0; owner < owners; ++owner) {
      const auto shard_bytes = static_cast<double>(bytes(parameters, plan_shard(parameters, owner, owners)));
      EXPECT_NEAR(shard_bytes, static_cast<double>(all) / owners, 4 * (64 + 8)) << owner << "/" << owners;
    }
}

TEST(ShardPlan, ShardsBeginAtCacheLines) {
  for (int owner = 1; owner < 5; ++owner) EXPECT_EQ(plan_shard({{100003, 4}}, owner, 5)[0].first % 16, 0U);
}

TEST(ShardPlan, AllowsFewerElementsThanOwners) {
  expect_complete_partition({{3, 4}}, 7);
  expect_complete_partition({}, 3);
  expect_complete_partition({{0, 4}, {0, 8}}, 3);
}

}  // namespace
}  // namespace lockstep::optim
