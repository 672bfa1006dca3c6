#include "lockstep/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::data {
namespace {

constexpr int kWorlds[] = {1, 2, 3, 4, 7};
constexpr std::uint64_t kSizes[] = {1, 2, 3, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 1023};

std::vector<std::uint64_t> indices_of(const EpochOrder& order) {
  std::vector<std::uint64_t> all;
  for (std::uint64_t k = 0; k < order.size(); ++k) all.push_back(order[k]);
  return all;
}

std::vector<std::uint64_t> range(std::uint64_t n) {
  std::vector<std::uint64_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<std::uint64_t> sorted(std::vector<std::uint64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

TEST(Permutation, IsABijection) {
  for (const auto n : kSizes)
    for (const std::uint64_t seed : {0ULL, 1ULL, 0xffffffffffffffffULL})
      for (const std::uint64_t epoch : {0, 1, 9}) {
        const Permutation permutation(n, seed, epoch);
        std::vector<std::uint64_t> all;
        for (std::uint64_t i = 0; i < n; ++i) all.push_back(permutation[i]);
        ASSERT_EQ(sorted(all), range(n)) << n << " " << seed << " " << epoch;
      }
}

TEST(Permutation, HandlesABillionWithoutDuplicates) {
  const Permutation permutation(1'000'000'007, 1, 0);
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 100'000; ++i) seen.insert(permutation[i * 9'973]);
  EXPECT_EQ(seen.size(), 100'000u);
  EXPECT_LT(*seen.rbegin(), 1'000'000'007u);
  EXPECT_LT(Permutation(std::uint64_t{1} << 62, 3, 4)[std::uint64_t{1} << 61], std::uint64_t{1} << 62);
}

TEST(Permutation, OrderIsStableAcrossVersions) {
  // The meaning of positions in old checkpoints must not change.
  const Permutation permutation(10, 1, 2);
  std::vector<std::uint64_t> all;
  for (std::uint64_t i = 0; i < 10; ++i) all.push_back(permutation[i]);
  EXPECT_THAT(all, testing::ElementsAre(9, 2, 3, 4, 8, 1, 0, 5, 7, 6));
}

TEST(Permutation, DependsOnSeedAndEpochIndependently) {
  const auto first = [](std::uint64_t seed, std::uint64_t epoch) {
    const Permutation permutation(1000, seed, epoch);
    std::vector<std::uint64_t> all;
    for (std::uint64_t i = 0; i < 20; ++i) all.push_back(permutation[i]);
    return all;
  };
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    for (std::uint64_t epoch = 0; epoch < 20; ++epoch) orders.insert(first(seed, epoch));
  EXPECT_EQ(orders.size(), 400u);
}

// Returns the sum of (observed - expected)^2 / expected, normalized to mean 0 and standard deviation 1.
double chi_square_score(const std::vector<double>& observed, double expected, double degrees) {
  double sum = 0;
  for (const double count : observed) sum += (count - expected) * (count - expected) / expected;
  return (sum - degrees) / std::sqrt(2 * degrees);
}

TEST(Permutation, AllPositionsAreEquallyLikely) {
  for (const std::uint64_t n : {5, 64, 100}) {
    constexpr int kEpochs = 4000;
    std::vector<double> counts(n * n);
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      const Permutation permutation(n, 7, static_cast<std::uint64_t>(epoch));
      for (std::uint64_t i = 0; i < n; ++i) counts[i * n + permutation[i]] += 1;
    }
    const double degrees = static_cast<double>((n - 1) * (n - 1));
    EXPECT_LT(std::abs(chi_square_score(counts, static_cast<double>(kEpochs) / static_cast<double>(n), degrees)), 5)
        << n;
  }
}

TEST(Permutation, AllOrdersOfFourAreEquallyLikely) {
  constexpr int kSeeds = 24'000;
  std::map<std::vector<std::uint64_t>, double> counts;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Permutation permutation(4, static_cast<std::uint64_t>(seed), 0);
    counts[{permutation[0], permutation[1], permutation[2], permutation[3]}] += 1;
  }
  ASSERT_EQ(counts.size(), 24u);
  std::vector<double> observed;
  for (const auto& [order, count] : counts) observed.push_back(count);
  EXPECT_LT(std::abs(chi_square_score(observed, kSeeds / 24.0, 23)), 5);
}

TEST(Permutation, SuccessiveElementsAreUncorrelated) {
  // The correlation of an element with its successor, whose standard deviation is 1 / sqrt(n) for a random order of n.
  constexpr std::uint64_t kN = 100'000;
  const Permutation permutation(kN, 3, 1);
  const double mean = (kN - 1) / 2.0;
  double product = 0, square = 0;
  for (std::uint64_t i = 0; i + 1 < kN; ++i) {
    const double a = static_cast<double>(permutation[i]) - mean, b = static_cast<double>(permutation[i + 1]) - mean;
    product += a * b;
    square += a * a;
  }
  EXPECT_LT(std::abs(product / square), 5 / std::sqrt(static_cast<double>(kN)));
}

TEST(Sampler, EveryModeCoversTheEpoch) {
  for (const auto n : kSizes)
    for (const int world : kWorlds)
      for (const bool shuffle : {true, false})
        for (const std::uint64_t epoch : {0, 3}) {
          const std::uint64_t size = static_cast<std::uint64_t>(world);
          std::map<ShardMode, std::map<std::uint64_t, int>> times;
          for (const auto mode : {ShardMode::kPad, ShardMode::kDrop, ShardMode::kExact}) {
            std::set<std::uint64_t> sizes;
            for (int rank = 0; rank < world; ++rank) {
              const auto order = Sampler(n, {rank, world}, {.seed = 5, .shuffle = shuffle, .mode = mode}).epoch(epoch);
              sizes.insert(order.size());
              for (const auto index : indices_of(order)) ++times[mode][index];
            }
            const bool uneven = mode == ShardMode::kExact && n % size != 0;
            ASSERT_EQ(sizes.size(), uneven ? 2u : 1u);
            ASSERT_EQ(*sizes.begin(), mode == ShardMode::kPad ? (n + size - 1) / size : n / size);
            ASSERT_LE(*sizes.rbegin() - *sizes.begin(), 1u);
          }
          // kExact draws each sample once, kPad each at least once and as evenly as possible, and kDrop none twice.
          ASSERT_EQ(times[ShardMode::kExact].size(), n);
          for (const auto& [index, count] : times[ShardMode::kExact]) ASSERT_EQ(count, 1);
          ASSERT_EQ(times[ShardMode::kPad].size(), n);
          const int most = static_cast<int>((size + n - 1) / n) + 1;
          for (const auto& [index, count] : times[ShardMode::kPad]) ASSERT_LE(count, n >= size ? 2 : most);
          ASSERT_EQ(times[ShardMode::kDrop].size(), n / size * size);
          for (const auto& [index, count] : times[ShardMode::kDrop]) ASSERT_EQ(count, 1);
        }
}

TEST(Sampler, PadsLikePyTorch) {
  // The values of torch.utils.data.DistributedSampler(range(10), 4, r, shuffle=False), and of range(2), in PyTorch
  // 2.11.
  const auto of = [](std::uint64_t n, int rank) {
    return indices_of(Sampler(n, {rank, 4}, {.shuffle = false}).epoch(0));
  };
  EXPECT_THAT(of(10, 0), testing::ElementsAre(0, 4, 8));
  EXPECT_THAT(of(10, 1), testing::ElementsAre(1, 5, 9));
  EXPECT_THAT(of(10, 2), testing::ElementsAre(2, 6, 0));
  EXPECT_THAT(of(10, 3), testing::ElementsAre(3, 7, 1));
  EXPECT_THAT(of(2, 2), testing::ElementsAre(0));
  EXPECT_THAT(of(2, 3), testing::ElementsAre(1));
  EXPECT_THAT(indices_of(Sampler(1, {6, 7}, {}).epoch(0)), testing::ElementsAre(0));
}

TEST(Sampler, OrderIsIndependentOfWorldSize) {
  const auto alone = indices_of(Sampler(100, {}, {.seed = 2}).epoch(4));
  for (const int world : {2, 4, 5}) {
    std::vector<std::uint64_t> together;
    for (std::uint64_t k = 0; k < 100 / static_cast<std::uint64_t>(world); ++k)
      for (int rank = 0; rank < world; ++rank) together.push_back(Sampler(100, {rank, world}, {.seed = 2}).epoch(4)[k]);
    EXPECT_EQ(together, alone) << world;
  }
}

TEST(Sampler, OrderDiffersPerEpoch) {
  // pytorch#73141: libtorch's sampler repeats one order.
  const Sampler sampler(100, {}, {.seed = 1});
  EXPECT_NE(indices_of(sampler.epoch(0)), indices_of(sampler.epoch(1)));
  EXPECT_EQ(indices_of(sampler.epoch(1)), indices_of(sampler.epoch(1)));
  EXPECT_EQ(indices_of(Sampler(100, {}, {.shuffle = false}).epoch(3)), range(100));
}

// Draws `steps` batches on every rank of a world, counts the draws, and returns the position afterwards.
std::uint64_t draw_batches(std::uint64_t n, int world, ShardMode mode, std::uint64_t batch, std::uint64_t position,
                           std::uint64_t steps, std::map<std::uint64_t, int>& draw_counts) {
  for (int rank = 0; rank < world; ++rank) {
    const BatchPlan plan(Sampler(n, {rank, world}, {.seed = 8, .mode = mode}).epoch(2, position), batch, false);
    for (std::uint64_t b = 0; b < std::min(steps, plan.num_batches()); ++b)
      for (const auto index : plan.indices(b)) ++draw_counts[index];
  }
  return std::min(n, position + steps * batch * static_cast<std::uint64_t>(world));
}

TEST(Sampler, ResumesInAnotherWorldSizeWithoutDuplicates) {
  constexpr std::uint64_t kAll = 1'000'000;
  for (const std::uint64_t n : {97, 100, 144, 1000}) {
    std::map<std::uint64_t, int> draw_counts;
    auto position = draw_batches(n, 4, ShardMode::kExact, 3, 0, 2, draw_counts);    // 24 samples
    position = draw_batches(n, 3, ShardMode::kExact, 5, position, 3, draw_counts);  // 45 samples
    ASSERT_EQ(position, 69u);
    position = draw_batches(n, 4, ShardMode::kExact, 2, position, kAll, draw_counts);
    EXPECT_EQ(position, n);
    ASSERT_EQ(draw_counts.size(), n);
    for (const auto& [index, count] : draw_counts) ASSERT_EQ(count, 1) << index;
  }
}

TEST(Sampler, CountsAreEqualAfterResume) {
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop}) {
    std::map<std::uint64_t, int> draw_counts;
    const auto position = draw_batches(100, 4, mode, 3, 0, 2, draw_counts);
    std::set<std::uint64_t> sizes;
    for (int rank = 0; rank < 3; ++rank)
      sizes.insert(Sampler(100, {rank, 3}, {.seed = 8, .mode = mode}).epoch(2, position).size());
    EXPECT_THAT(sizes, testing::ElementsAre(mode == ShardMode::kPad ? 26u : 25u));  // 76 remain
    draw_batches(100, 3, mode, 4, position, 1000, draw_counts);
    // 76 = 25 * 3 + 1: padding repeats two samples of the beginning of the epoch, dropping omits one.
    EXPECT_EQ(draw_counts.size(), mode == ShardMode::kPad ? 100u : 99u);
    EXPECT_EQ(
        std::count_if(draw_counts.begin(), draw_counts.end(), [](const auto& entry) { return entry.second == 2; }),
        mode == ShardMode::kPad ? 2 : 0);
  }
}

TEST(Sampler, IsEmptyAtEndOfEpoch) {
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop, ShardMode::kExact})
    EXPECT_EQ(Sampler(10, {1, 3}, {.mode = mode}).epoch(0, 10).size(), 0u);
}

TEST(Sampler, RejectsInvalidArguments) {
  EXPECT_THROW(Sampler(0, {}, {}), base::UsageError);
  EXPECT_THROW(Sampler(10, {3, 3}, {}), base::UsageError);
  EXPECT_THROW(Sampler(10, {-1, 3}, {}), base::UsageError);
  EXPECT_THROW(Sampler(10, {0, 0}, {}), base::UsageError);
  EXPECT_THROW(Sampler(10, {}, {}).epoch(0, 11), base::UsageError);
}

TEST(BatchPlan, SplitsOrderIntoBatches) {
  const auto order = Sampler(10, {}, {.shuffle = false}).epoch(0);
  const BatchPlan keep(order, 4, false), drop(order, 4, true);
  EXPECT_EQ(keep.num_batches(), 3u);
  EXPECT_THAT(keep.indices(1), testing::ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(keep.indices(2), testing::ElementsAre(8, 9));
  EXPECT_EQ(drop.num_batches(), 2u);
}

TEST(LoaderPosition, RoundTrips) {
  const LoaderPosition position{
      .seed = 0xffffffffffffffffULL, .epoch = 3, .samples_drawn = 42, .num_samples = 100, .shuffle = false};
  EXPECT_EQ(to_text(position), "seed=18446744073709551615 epoch=3 samples=42 num_samples=100 shuffle=0");
  const checkpoint::StateDict state = to_state_dict(position);
  EXPECT_EQ(position_from_state_dict(state), position);
  for (const auto& [name, value] : state) {
    checkpoint::StateDict incomplete = state, longer = state;
    incomplete.erase(name);
    longer[name + "s"] = value;
    EXPECT_THROW(position_from_state_dict(incomplete), base::UsageError) << name;
    EXPECT_THROW(position_from_state_dict(longer), base::UsageError) << name;
  }
}

}  // namespace
}  // namespace lockstep::data
