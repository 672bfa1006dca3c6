// Tests loaders on the ranks of a job: together they draw every sample, and the group counts the batches of each rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/comm/group_access.h"
#include "lockstep/data/loader.h"
#include "tests/support/rank_main.h"

namespace lockstep::data::data_test {
namespace {

using tests::world;

constexpr std::int64_t kSamples = 53;

auto sample(std::size_t i) { return Example{torch::ones({2}), torch::tensor(static_cast<std::int64_t>(i))}; }

/// Returns how often each sample is drawn in `epoch` by all ranks together.
at::Tensor counts(LoaderOptions options, std::uint64_t epoch) {
  auto loader = make_loader(kSamples, sample, world(), options);
  auto times = torch::zeros({kSamples}, torch::kInt64);
  for (auto& batch : loader.epoch(epoch)) times += torch::bincount(batch.target, {}, kSamples);
  world().all_reduce(times);
  return times;
}

TEST(Data, RanksTogetherDrawEverySample) {
  for (const int workers : {0, 2}) {
    const auto exact = counts({.batch_size = 4, .seed = 1, .mode = ShardMode::kExact, .num_workers = workers}, 1);
    EXPECT_TRUE(exact.equal(torch::ones({kSamples}, torch::kInt64))) << exact;
    const auto padded = counts({.batch_size = 4, .seed = 1, .num_workers = workers}, 1);
    EXPECT_GE(padded.min().item<std::int64_t>(), 1);
    EXPECT_EQ(padded.sum().item<std::int64_t>() % world().size(), 0);
    const auto dropped = counts({.batch_size = 4, .seed = 1, .mode = ShardMode::kDrop, .num_workers = workers}, 1);
    EXPECT_LE(dropped.max().item<std::int64_t>(), 1);
    EXPECT_EQ(dropped.sum().item<std::int64_t>(), kSamples - kSamples % world().size());
  }
}

TEST(Data, GroupCountsBatchesWhenRanksDrawEqually) {
  const auto drawn = [](ShardMode mode) {
    auto loader = make_loader(kSamples, sample, world(), {.batch_size = 4, .mode = mode});
    const auto before = comm::GroupAccess::step_identity(world()).batches;
    std::int64_t batches = 0;
    for (auto& batch : loader.epoch(0)) batches += batch.target.defined();
    return std::pair(batches, comm::GroupAccess::step_identity(world()).batches - before);
  };
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop}) {
    const auto [batches, counted] = drawn(mode);
    EXPECT_GT(batches, 0);
    EXPECT_EQ(counted, world().size() == 1 ? 0 : batches);
    auto most = torch::tensor(batches), fewest = torch::tensor(batches);
    world().all_reduce(most, comm::ReduceOp::kMax);
    world().all_reduce(fewest, comm::ReduceOp::kMin);
    EXPECT_TRUE(most.equal(fewest));
  }
  EXPECT_EQ(drawn(ShardMode::kExact).second, 0) << "counts may differ there";
}

TEST(Data, PositionIsTheSameOnAllRanks) {
  auto loader = make_loader(kSamples, sample, world(), {.batch_size = 2, .seed = 9});
  int steps = 0;
  for (auto& batch : loader.epoch(4))
    if (batch.target.defined() && ++steps == 3) break;
  const auto mine = to_text(loader.position());
  for (const auto& other : world().all_gather_bytes(mine)) EXPECT_EQ(other, mine);
  EXPECT_EQ(loader.position().samples_drawn,
            std::min<std::uint64_t>(kSamples, 6 * static_cast<std::uint64_t>(world().size())));
}

}  // namespace
}  // namespace lockstep::data::data_test
