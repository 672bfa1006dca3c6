// Tests the guarantees of the hierarchical transport beyond those of all transports. The ranks simulate several hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <map>

#include "lockstep/base/error.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::hierarchy_test {
namespace {

using tests::world;

constexpr std::int64_t kLarge = (std::int64_t{3} << 20) + 17;  // several chunks per rank, the last one not full

/// Returns the ranks of each host, in the order of the first ranks of the hosts.
std::vector<std::vector<int>> hosts() {
  const at::Tensor all = at::empty({world().size()}, at::kLong);
  world().all_gather(all, at::full({1}, world().node_rank(), at::kLong));
  std::vector<std::vector<int>> ranks(static_cast<std::size_t>(world().num_nodes()));
  for (int r = 0; r < world().size(); ++r) ranks.at(static_cast<std::size_t>(all[r].item<int>())).push_back(r);
  return ranks;
}

at::Tensor values_of(int rank, std::int64_t count) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + rank));
  return torch::randn({count});
}

/// Returns for each host the sum over its ranks, added in their order.
std::vector<at::Tensor> host_sums(std::int64_t count) {
  std::vector<at::Tensor> sums;
  for (const auto& ranks : hosts()) {
    at::Tensor sum = values_of(ranks.front(), count);
    for (std::size_t i = 1; i < ranks.size(); ++i) sum = sum + values_of(ranks[i], count);
    sums.push_back(sum);
  }
  return sums;
}

at::Tensor sum_of(const std::vector<at::Tensor>& parts) {
  at::Tensor sum = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) sum = sum + parts[i];
  return sum;
}

TEST(Hierarchy, HostsAreDetectedBySharedMemory) {
  const auto ranks = hosts();
  EXPECT_EQ(world().transport(), "hierarchy");
  EXPECT_GT(world().num_nodes(), 1);
  EXPECT_EQ(world().local_size(), static_cast<int>(ranks.at(static_cast<std::size_t>(world().node_rank())).size()));
  Group here = world().split_by_host();
  EXPECT_EQ(here.size(), world().local_size());
  EXPECT_EQ(here.rank(), world().local_rank());
  const at::Tensor sum = at::full({kLarge}, 1.0F);
  here.all_reduce(sum);
  EXPECT_TRUE(sum.eq(world().local_size()).all().item<bool>());
}

TEST(Hierarchy, LargeSumAddsRanksOfEachHostThenHosts) {
  const at::Tensor tensor = values_of(world().rank(), kLarge);
  world().all_reduce(tensor);
  EXPECT_TRUE(tensor.equal(sum_of(host_sums(kLarge))));
}

TEST(Hierarchy, SmallSumAddsInTheSameOrder) {
  const at::Tensor tensor = values_of(world().rank(), 1000);
  world().all_reduce(tensor);
  EXPECT_TRUE(tensor.equal(sum_of(host_sums(1000))));
}

TEST(Hierarchy, WireDtypeRoundsHostSumsAndResultOnce) {
  for (const at::ScalarType wire_dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor tensor = values_of(world().rank(), kLarge);
    world().all_reduce(tensor, ReduceOp::kMean, {.wire_dtype = wire_dtype});
    std::vector<at::Tensor> rounded;
    for (const at::Tensor& sum : host_sums(kLarge)) rounded.push_back(sum.to(wire_dtype).to(at::kFloat));
    const at::Tensor expected = (sum_of(rounded) / world().size()).to(wire_dtype).to(at::kFloat);
    EXPECT_TRUE(tensor.equal(expected)) << c10::toString(wire_dtype);
  }
}

TEST(Hierarchy, Int8RoundsHostSumsAndResultByAHalfStepEach) {
  for (const std::int64_t count : {kLarge, std::int64_t{1500}, std::int64_t{3 * (2 << 20) + 77}})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean}) {
      const at::Tensor tensor = values_of(world().rank(), count);
      world().all_reduce(tensor, op, {.wire_dtype = at::kChar});
      const double divisor = op == ReduceOp::kMean ? world().size() : 1;
      at::Tensor exact = at::zeros({count}, at::kDouble);
      double bound = 0;
      for (const at::Tensor& sum : host_sums(count)) {
        exact += sum.to(at::kDouble) / divisor;
        bound += sum.abs().max().item<double>() / 127 / 2 / divisor;
      }
      bound += (exact.abs().max().item<double>() + bound) / 127 / 2;
      const double error = (tensor.to(at::kDouble) - exact).abs().max().item<double>();
      EXPECT_LT(error, 1.001 * bound) << count;
      EXPECT_GT(error, 0.2 * bound) << count;
      const at::Tensor all = at::empty({world().size() * count});
      world().all_gather(all, tensor);
      for (int rank = 0; rank < world().size(); ++rank)
        EXPECT_TRUE(all.narrow(0, rank * count, count).equal(tensor)) << count << ", rank " << rank;
    }
}

TEST(Hierarchy, Int8PassesOnWhatIsNotFinite) {
  const at::Tensor tensor = values_of(world().rank(), kLarge);
  if (world().rank() == 1) tensor[1000] = std::numeric_limits<float>::infinity();
  world().all_reduce(tensor, ReduceOp::kSum, {.wire_dtype = at::kChar});
  EXPECT_FALSE(std::isfinite(tensor[1000].item<float>()));
  EXPECT_LE(tensor.isfinite().logical_not().sum().item<std::int64_t>(), 256);
}

TEST(Hierarchy, WireDtypeForOtherThanFloat32IsRejected) {
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [&] { world().all_reduce(at::ones({4}), ReduceOp::kMax, {.wire_dtype = at::kChar}); }),
              ::testing::HasSubstr("wire_dtype is int8 with the operation max; expected sum or mean"));
  const at::Tensor tensor = at::ones({4}, at::kDouble);
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [&] { world().all_reduce(tensor, ReduceOp::kSum, {.wire_dtype = at::kBFloat16}); }),
              ::testing::HasSubstr("all_reduce(float64[4]): wire_dtype is BFloat16, which requires a float32 tensor"));
  EXPECT_THAT(tests::message_of<base::UsageError>(
                  [&] { world().all_reduce(at::ones({4}), ReduceOp::kSum, {.wire_dtype = at::kDouble}); }),
              ::testing::HasSubstr("does not send float32 as Double; expected float32, bfloat16, float16"));
}

TEST(Hierarchy, LargeTensorsOutsideTheArenaAreCopiedThroughIt) {
  const at::Tensor source = values_of(world().rank(), kLarge);
  const std::unique_ptr<float[]> own(new float[static_cast<std::size_t>(kLarge)]);
  const at::Tensor tensor = torch::from_blob(own.get(), {kLarge});
  tensor.copy_(source);
  world().all_reduce(tensor, ReduceOp::kMax);
  at::Tensor expected = values_of(0, kLarge);
  for (int r = 1; r < world().size(); ++r) expected = at::maximum(expected, values_of(r, kLarge));
  EXPECT_TRUE(tensor.equal(expected));
}

TEST(Hierarchy, LargeBroadcastsFromEveryRank) {
  for (int root = 0; root < world().size(); ++root) {
    const at::Tensor tensor = values_of(world().rank(), kLarge);
    world().broadcast(tensor, root);
    EXPECT_TRUE(tensor.equal(values_of(root, kLarge))) << root;
  }
}

TEST(Hierarchy, LargeReducesToEveryRankAndScatters) {
  const at::Tensor sum = sum_of(host_sums(kLarge));
  for (int root = 0; root < world().size(); ++root) {
    const at::Tensor tensor = values_of(world().rank(), kLarge);
    world().reduce(tensor, root);
    EXPECT_TRUE(world().rank() != root || tensor.equal(sum)) << root;
  }
  const std::int64_t part = kLarge / world().size();
  const at::Tensor input = values_of(world().rank(), kLarge).narrow(0, 0, part * world().size()).contiguous();
  const at::Tensor kept = input.clone();
  const at::Tensor output = at::empty({part});
  world().reduce_scatter(output, input);
  EXPECT_TRUE(output.equal(sum.narrow(0, part * world().rank(), part)));
  EXPECT_TRUE(input.equal(kept));
}

TEST(Hierarchy, LargeAndSmallOperationsInFlightKeepTheirOrder) {
  const int size = world().size();
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(at::full({i % 3 == 0   ? kLarge / 4
                                : i % 3 == 1 ? 10
                                             : 5000},
                               static_cast<float>(world().rank() + i)));
    works.push_back(world().all_reduce_async(tensors.back()));
  }
  for (int i = 0; i < 12; ++i) {
    works[static_cast<std::size_t>(i)].wait();
    EXPECT_TRUE(tensors[static_cast<std::size_t>(i)]
                    .eq(static_cast<float>(size * (size - 1) / 2 + size * i))
                    .all()
                    .item<bool>())
        << i;
  }
}

TEST(Hierarchy, ResultsAreReproducible) {
  std::vector<at::Tensor> results;
  for (int run = 0; run < 2; ++run) {
    at::Tensor state = values_of(world().rank(), 50000);
    for (int step = 0; step < 20; ++step)
      world().all_reduce(state.mul_(0.9), ReduceOp::kMean, {.wire_dtype = step % 2 ? at::kBFloat16 : at::kFloat});
    results.push_back(state);
  }
  EXPECT_TRUE(results[0].equal(results[1]));
  const at::Tensor all = at::empty({world().size() * 50000});
  world().all_gather(all, results[0]);
  for (int r = 0; r < world().size(); ++r) EXPECT_TRUE(all.narrow(0, r * 50000, 50000).equal(results[0])) << r;
}

}  // namespace
}  // namespace lockstep::comm::hierarchy_test
