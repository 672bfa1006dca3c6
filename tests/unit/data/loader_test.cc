#include "lockstep/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/data/datasets/char_dataset.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data {
namespace {

using testing::HasSubstr;
using tests::message_of;

// A libtorch dataset: sample i has data [i, i] and target i.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(std::size_t size) : n(size) {}
  torch::data::Example<> get(std::size_t i) override {
    return {torch::full({2}, static_cast<float>(i)), torch::tensor(static_cast<std::int64_t>(i))};
  }
  std::optional<std::size_t> size() const override { return n; }
  std::size_t n;
};

std::vector<std::int64_t> targets(const at::Tensor& target) {
  return {target.const_data_ptr<std::int64_t>(), target.const_data_ptr<std::int64_t>() + target.numel()};
}

template <typename L>
std::vector<std::vector<std::int64_t>> collect_batches(L& loader, std::uint64_t epoch) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader.epoch(epoch)) batches.push_back(targets(batch.target));
  return batches;
}

template <typename L>
int num_batches(L& loader) {
  int batches = 0;
  for (auto& batch : loader.epoch(0)) batches += batch.defined();
  return batches;
}

TEST(Loader, ReturnsStackedBatchesOfTorchDataset) {
  auto loader = make_loader(Numbers(10), DataShard{}, {.batch_size = 4, .seed = 1});
  EXPECT_EQ(loader.batches_per_epoch(), 3u);
  std::vector<std::int64_t> all;
  std::vector<std::int64_t> sizes;
  for (auto& batch : loader.epoch(0)) {
    sizes.push_back(batch.data.size(0));
    EXPECT_EQ(batch.data.sizes().slice(1), at::IntArrayRef({2}));
    EXPECT_TRUE(batch.data.select(1, 0).to(torch::kInt64).equal(batch.target));
    for (const auto i : targets(batch.target)) all.push_back(i);
  }
  EXPECT_THAT(sizes, testing::ElementsAre(4, 4, 2));
  EXPECT_THAT(all, testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_NE(collect_batches(loader, 0), collect_batches(loader, 1));
}

TEST(Loader, FollowsTheSamplerOnEveryRank) {
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop, ShardMode::kExact})
    for (int rank = 0; rank < 3; ++rank) {
      auto loader = make_loader(Numbers(20), DataShard{rank, 3}, {.batch_size = 3, .seed = 4, .mode = mode});
      const auto order = Sampler(20, {rank, 3}, {.seed = 4, .mode = mode}).epoch(6);
      std::vector<std::int64_t> got;
      for (const auto& batch : collect_batches(loader, 6)) got.insert(got.end(), batch.begin(), batch.end());
      ASSERT_EQ(got.size(), order.size());
      for (std::size_t k = 0; k < got.size(); ++k) EXPECT_EQ(static_cast<std::uint64_t>(got[k]), order[k]);
    }
}

TEST(Loader, BatchesDoNotDependOnNumWorkers) {
  auto inline_loader = make_loader(Numbers(101), DataShard{}, {.batch_size = 4, .seed = 1});
  const auto expected = collect_batches(inline_loader, 2);
  for (const int workers : {1, 2, 5, 40}) {
    // The samples take unequal times, so they finish out of order, and the loader must reorder them.
    auto loader = make_loader(101,
                              [](std::size_t i) {
                                std::this_thread::sleep_for(std::chrono::microseconds(i % 7 * 100));
                                return Numbers(101).get(i);
                              },
                              DataShard{}, {.batch_size = 4, .seed = 1, .num_workers = workers, .prefetch = 3});
    EXPECT_EQ(collect_batches(loader, 2), expected) << workers;
    EXPECT_EQ(collect_batches(loader, 2), expected) << "again";
  }
}

TEST(Loader, WorkersRunConcurrently) {
  // Sample 0 finishes only after sample 1 has begun: a single thread would never finish.
  std::mutex mutex;
  std::condition_variable begun;
  bool second = false;
  auto loader = make_loader(2,
                            [&](std::size_t i) {
                              std::unique_lock lock(mutex);
                              if (i == 1) {
                                second = true;
                                begun.notify_all();
                              } else if (!begun.wait_for(lock, std::chrono::seconds(20), [&] { return second; })) {
                                throw std::runtime_error("no other thread makes a sample");
                              }
                              return torch::tensor(static_cast<std::int64_t>(i));
                            },
                            DataShard{}, {.shuffle = false, .num_workers = 2});
  std::int64_t sum = 0;
  for (auto& batch : loader.epoch(0)) sum += batch.sum().item<std::int64_t>();
  EXPECT_EQ(sum, 1);
}

TEST(Loader, RespectsPrefetchLimit) {
  std::atomic<int> made{0};
  auto loader = make_loader(100,
                            [&](std::size_t i) {
                              ++made;
                              return torch::tensor(static_cast<std::int64_t>(i));
                            },
                            DataShard{}, {.num_workers = 2, .prefetch = 3});
  int taken = 0;
  for (auto& batch : loader.epoch(0)) {
    (void)batch;
    ++taken;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_LE(made.load(), taken + 6);
  }
  EXPECT_EQ(taken, 100);
}

TEST(Loader, ExceptionIsRethrownInOrderWithItsSample) {
  for (const int workers : {0, 1, 3}) {
    auto loader = make_loader(20,
                              [](std::size_t i) {
                                if (i >= 9) throw std::runtime_error("the file is\ngone");
                                return torch::tensor(static_cast<std::int64_t>(i));
                              },
                              DataShard{}, {.batch_size = 2, .shuffle = false, .num_workers = workers});
    int batches = 0;
    try {
      for (auto& batch : loader.epoch(0)) batches += batch.size(0) == 2;
      ADD_FAILURE() << "no exception";
    } catch (const SampleError& error) {
      EXPECT_EQ(error.index(), 9u);
      EXPECT_STREQ(error.what(), "sample 9: the file is");
      EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error);
    }
    EXPECT_EQ(batches, 4) << "the batches before the error are complete";
    EXPECT_EQ(loader.position().samples_drawn, 8u);
  }
}

TEST(Loader, KeepsCauseAndFirstLineOfException) {
  auto format =
      make_loader(1, [](std::size_t) -> at::Tensor { throw base::FormatError("x.png:12: bad"); }, DataShard{});
  const auto error = tests::thrown<SampleError>([&] { format.epoch(0).begin(); });
  EXPECT_EQ(error.cause(), base::Cause::kBadFile);
  EXPECT_STREQ(error.what(), "sample 0: x.png:12: bad");
  auto torch_error = make_loader(1, [](std::size_t) { return torch::ones({2}).view({3}); }, DataShard{});
  const auto message = message_of<SampleError>([&] { torch_error.epoch(0).begin(); });
  EXPECT_THAT(message, HasSubstr("sample 0: shape '[3]' is invalid"));
  EXPECT_THAT(message, testing::Not(HasSubstr("\n")));
  auto odd = make_loader(1, [](std::size_t) -> at::Tensor { throw 7; }, DataShard{});
  EXPECT_THAT(message_of<SampleError>([&] { odd.epoch(0).begin(); }), HasSubstr("not a std::exception"));
}

TEST(Loader, ErrorNamesSamplesThatCannotBeStacked) {
  auto loader = make_loader(
      4,
      [](std::size_t i) { return Example{torch::ones({static_cast<std::int64_t>(i < 3 ? 2 : 5)}), torch::tensor(1)}; },
      DataShard{}, {.batch_size = 4, .shuffle = false});
  const auto message = message_of<base::UsageError>([&] { loader.epoch(0).begin(); });
  EXPECT_THAT(message, HasSubstr("data of sample 0 is Float[2] and of sample 3 Float[5]"));
}

TEST(Loader, LeavingTheLoopStopsWorkers) {
  std::atomic<int> made{0};
  auto loader = make_loader(100'000,
                            [&](std::size_t i) {
                              ++made;
                              return torch::tensor(static_cast<std::int64_t>(i));
                            },
                            DataShard{}, {.batch_size = 10, .num_workers = 2});
  for (auto& batch : loader.epoch(0)) {
    (void)batch;
    break;
  }
  const int after = made.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(made.load(), after) << "a thread still makes samples";
  EXPECT_LT(after, 200);
  EXPECT_EQ(num_batches(loader), 10'000);
}

TEST(Loader, StuckSampleTimesOutAndDoesNotBlockDestructor) {
  // The detached thread owns this object and must not refer to the test's stack.
  struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool open = false;
    bool passed = false;
  };
  const auto gate = std::make_shared<Gate>();
  const auto begin = std::chrono::steady_clock::now();
  {
    auto loader =
        make_loader(3,
                    [gate](std::size_t i) {
                      std::unique_lock lock(gate->mutex);
                      gate->opened.wait_for(lock, std::chrono::seconds(60), [&] { return gate->open; });
                      gate->passed = true;
                      gate->opened.notify_all();
                      return torch::tensor(static_cast<std::int64_t>(i));
                    },
                    DataShard{}, {.shuffle = false, .num_workers = 1, .timeout = std::chrono::milliseconds(100)});
    EXPECT_THAT(message_of<base::TimeoutError>([&] { loader.epoch(7).begin(); }),
                HasSubstr("batch 0 of 3 of epoch 7 was not ready after 100 ms; its first sample is 0"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  std::unique_lock lock(gate->mutex);
  gate->open = true;
  gate->opened.notify_all();
  EXPECT_TRUE(gate->opened.wait_for(lock, std::chrono::seconds(20), [&] { return gate->passed; }));
}

TEST(Loader, ResumesInAnotherWorldSizeWithoutDuplicates) {
  std::map<std::int64_t, int> draw_counts;
  checkpoint::StateDict saved;
  const auto steps = [&](int world, std::int64_t batch_size, int num_steps) {
    LoaderPosition position;
    for (int rank = 0; rank < world; ++rank) {
      auto loader =
          make_loader(Numbers(101), DataShard{rank, world},
                      {.batch_size = batch_size, .seed = 3, .mode = ShardMode::kExact, .num_workers = rank % 2});
      if (!saved.empty()) loader.load_state_dict(saved);
      int step = 0;
      for (auto& batch : loader.epoch(5)) {
        for (const auto i : targets(batch.target)) ++draw_counts[i];
        if (++step == num_steps) break;
      }
      if (rank == 0) position = loader.position();
    }
    saved = to_state_dict(position);
    return to_text(position);
  };
  EXPECT_EQ(steps(4, 3, 2), "seed=3 epoch=5 samples=24 num_samples=101 shuffle=1");
  EXPECT_EQ(steps(3, 4, 3), "seed=3 epoch=5 samples=60 num_samples=101 shuffle=1");
  EXPECT_EQ(steps(4, 2, -1), "seed=3 epoch=5 samples=101 num_samples=101 shuffle=1");
  EXPECT_EQ(draw_counts.size(), 101u);
  for (const auto& [index, count] : draw_counts) EXPECT_EQ(count, 1) << index;
}

TEST(Loader, PositionAppliesToItsEpochOnly) {
  auto loader = make_loader(Numbers(10), DataShard{}, {.batch_size = 2, .seed = 1});
  const auto whole = collect_batches(loader, 3);
  loader.load_state_dict(to_state_dict({.seed = 1, .epoch = 3, .samples_drawn = 6, .num_samples = 10}));
  auto rest = loader.epoch(3);
  EXPECT_EQ(rest.size(), 2u);
  EXPECT_EQ(loader.batches_per_epoch(), 5u);
  loader.load_state_dict(to_state_dict({.seed = 1, .epoch = 3, .samples_drawn = 6, .num_samples = 10}));
  EXPECT_EQ(collect_batches(loader, 3), std::vector(whole.begin() + 3, whole.end()));
  EXPECT_EQ(collect_batches(loader, 3), whole);
  // A position at the end of its epoch leaves no batch.
  loader.load_state_dict(loader.state_dict());
  EXPECT_TRUE(collect_batches(loader, 3).empty());
  EXPECT_EQ(collect_batches(loader, 4).size(), 5u);
}

// The targets of the first `limit` batches of a loop over the loader itself.
template <typename L>
std::vector<std::vector<std::int64_t>> loop(L& loader, std::size_t limit = 1000) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader) {
    batches.push_back(targets(batch.target));
    if (batches.size() == limit) break;
  }
  return batches;
}

TEST(Loader, IsARangeOverOneEpochAfterAnother) {
  auto loader = make_loader(Numbers(10), DataShard{}, {.batch_size = 4, .seed = 1});
  static_assert(std::input_iterator<decltype(loader.begin())>);
  static_assert(std::sentinel_for<std::default_sentinel_t, decltype(loader.begin())>);
  auto by_number = make_loader(Numbers(10), DataShard{}, {.batch_size = 4, .seed = 1});
  for (const std::uint64_t epoch : {0, 1, 2}) {
    EXPECT_EQ(loop(loader), collect_batches(by_number, epoch));
    EXPECT_EQ(loader.position(), by_number.position());
  }
  EXPECT_EQ(collect_batches(loader, 7), collect_batches(by_number, 7));
  EXPECT_EQ(loop(loader), collect_batches(by_number, 8)) << "the epoch that follows epoch(7)";
}

TEST(Loader, LoopAfterBreakContinuesInTheSameEpoch) {
  for (const int num_workers : {0, 2}) {
    const LoaderOptions options{.batch_size = 2, .seed = 1, .num_workers = num_workers};
    auto loader = make_loader(Numbers(10), DataShard{}, options);
    auto by_number = make_loader(Numbers(10), DataShard{}, options);
    const auto whole = collect_batches(by_number, 0);
    EXPECT_EQ(loop(loader, 2), std::vector(whole.begin(), whole.begin() + 2));
    const LoaderPosition saved = loader.position();
    EXPECT_EQ(loop(loader, 3), std::vector(whole.begin() + 2, whole.end())) << "a break at the last batch";
    EXPECT_EQ(loop(loader), collect_batches(by_number, 1));
    auto resumed = make_loader(Numbers(10), DataShard{}, options);
    resumed.load_state_dict(to_state_dict(saved));
    EXPECT_EQ(loop(resumed), std::vector(whole.begin() + 2, whole.end()));
    EXPECT_EQ(loop(resumed, 1).size(), 1u);
    EXPECT_EQ(collect_batches(resumed, 1), collect_batches(by_number, 1)) << "epoch() begins it anew";
  }
}

TEST(Loader, RanksWithoutARemainingBatchStayInTheEpoch) {
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop, ShardMode::kExact})
    for (int rank = 0; rank < 2; ++rank) {
      auto loader = make_loader(Numbers(5), DataShard{rank, 2}, {.batch_size = 1, .mode = mode});
      loader.load_state_dict(to_state_dict({.samples_drawn = 4, .num_samples = 5}));
      loop(loader);
      // kDrop omits the fifth sample, so that the position is that of a complete epoch.
      EXPECT_EQ(loader.position().epoch, mode == ShardMode::kDrop ? 1u : 0u) << rank;
    }
}

TEST(Loader, PadAndDropGiveEqualBatchesOnAllRanks) {
  for (const auto mode : {ShardMode::kPad, ShardMode::kDrop})
    for (const bool drop_last : {false, true})
      for (const std::size_t n : {1, 2, 3, 10, 29}) {
        std::set<std::vector<std::size_t>> seen;
        for (int rank = 0; rank < 4; ++rank) {
          auto loader =
              make_loader(Numbers(n), DataShard{rank, 4}, {.batch_size = 3, .mode = mode, .drop_last = drop_last});
          std::vector<std::size_t> sizes;
          for (const auto& batch : collect_batches(loader, 1)) sizes.push_back(batch.size());
          EXPECT_EQ(sizes.size(), loader.batches_per_epoch());
          seen.insert(sizes);
        }
        EXPECT_EQ(seen.size(), 1u) << n;
      }
}

TEST(Loader, CountsEachBatchReturned) {
  int counted = 0;
  auto loader = detail::make_loader(Numbers(10), {0, 2}, {.batch_size = 2, .num_workers = 2},
                                    [&](const LoaderPosition&) { ++counted; });
  for (auto& batch : loader.epoch(0)) {
    (void)batch;
    if (counted == 2) break;
  }
  EXPECT_EQ(counted, 2) << "prefetched batches do not count";
  collect_batches(loader, 1);
  EXPECT_EQ(counted, 5);
  EXPECT_TRUE(has_equal_batch_counts({0, 2}, {.mode = ShardMode::kPad}));
  EXPECT_TRUE(has_equal_batch_counts({0, 2}, {.mode = ShardMode::kDrop}));
  EXPECT_FALSE(has_equal_batch_counts({0, 2}, {.mode = ShardMode::kExact}));
  EXPECT_FALSE(has_equal_batch_counts({0, 1}, {.mode = ShardMode::kPad}));
}

TEST(Loader, EachBatchCountsAsProgress) {
  const auto& alive = base::telemetry::RankPage::this_process().alive_count;
  auto loader = make_loader(Numbers(10), DataShard{}, {.batch_size = 2});  // as for an evaluation on one rank
  const std::uint64_t before = alive;
  collect_batches(loader, 0);
  EXPECT_EQ(alive, before + 5);
}

TEST(Loader, AnEpochIsIteratedOnce) {
  auto loader = make_loader(Numbers(6), DataShard{}, {.batch_size = 2});
  auto epoch = loader.epoch(0);
  int batches = 0;
  for ([[maybe_unused]] auto& batch : epoch) ++batches;
  EXPECT_EQ(batches, 3);
  EXPECT_THROW(epoch.begin(), base::UsageError);
}

TEST(Loader, RemainingEpochs) {
  auto loader = make_loader(Numbers(6), DataShard{}, {.batch_size = 2});
  const auto remaining = [&] {
    std::vector<std::uint64_t> epochs;
    for (const std::uint64_t epoch : loader.remaining_epochs(3)) epochs.push_back(epoch);
    return epochs;
  };
  EXPECT_EQ(remaining(), (std::vector<std::uint64_t>{0, 1, 2}));
  for ([[maybe_unused]] auto& batch : loader.epoch(0)) break;
  EXPECT_EQ(remaining(), (std::vector<std::uint64_t>{0, 1, 2})) << "inside epoch 0";
  for ([[maybe_unused]] auto& batch : loader.epoch(1)) static_cast<void>(0);
  EXPECT_EQ(remaining(), (std::vector<std::uint64_t>{2}));
  for ([[maybe_unused]] auto& batch : loader.epoch(2)) static_cast<void>(0);
  EXPECT_EQ(remaining(), (std::vector<std::uint64_t>{}));
  for ([[maybe_unused]] auto& batch : loader.epoch(7)) static_cast<void>(0);
  EXPECT_EQ(remaining(), (std::vector<std::uint64_t>{})) << "beyond the last one";
}

TEST(Loader, AcceptsEveryMapStyleDataset) {
  // With Stack<>, a dataset of torch with transforms returns a batch; without it, the dataset returns several samples.
  auto stacked = make_loader(Numbers(6).map(torch::data::transforms::Stack<>()), DataShard{}, {.batch_size = 4});
  auto mapped = make_loader(Numbers(6).map(torch::data::transforms::Normalize<>(0.0, 2.0)), DataShard{},
                            {.batch_size = 4, .num_workers = 1});
  auto plain = make_loader(Numbers(6), DataShard{}, {.batch_size = 4});
  EXPECT_EQ(collect_batches(stacked, 0), collect_batches(plain, 0));
  for (auto& batch : mapped.epoch(0))
    EXPECT_TRUE(batch.data.flatten(1).select(1, 0).equal(batch.target.to(torch::kFloat32) / 2));
  // Samples without a target, samples that are plain tensors, and samples of other types, which are not stacked.
  auto untargeted =
      make_loader(6, [](std::size_t i) { return torch::data::TensorExample(torch::full({2}, static_cast<float>(i))); },
                  DataShard{}, {.batch_size = 3});
  EXPECT_EQ(untargeted.epoch(0).begin()->data.sizes(), at::IntArrayRef({3, 2}));
  auto words = make_loader(6, [](std::size_t i) { return std::string(i, 'x'); }, DataShard{},
                           {.batch_size = 6, .shuffle = false});
  EXPECT_EQ((*words.epoch(0).begin())[3], "xxx");
  auto labelled = make_loader(
      2, [](std::size_t i) { return torch::data::Example<at::Tensor, int>(torch::ones({2}), static_cast<int>(i)); },
      DataShard{}, {.batch_size = 2, .shuffle = false});
  EXPECT_EQ(labelled.epoch(0).begin()->at(1).target, 1) << "an int is not stacked, and not lost";
  auto characters =
      make_loader(CharDataset(std::vector<std::int32_t>(100, 1), {.block_size = 9}), DataShard{}, {.batch_size = 5});
  EXPECT_EQ(characters.epoch(0).begin()->target.sizes(), at::IntArrayRef({5, 9}));
}

TEST(Loader, EachWorkerCopiesTheDataset) {
  struct Counting {
    int uses = 0;  // unguarded, so that TSan reports it if two threads share a copy
    at::Tensor get(std::size_t) { return torch::tensor(++uses); }
    std::size_t size() const { return 64; }
  };
  auto loader = make_loader(Counting{}, DataShard{}, {.batch_size = 2, .num_workers = 4});
  // Every copy counts from 1 without a gap, whichever batches it makes.
  std::multiset<int> uses;
  for (auto& batch : loader.epoch(0))
    for (int i = 0; i < 2; ++i) uses.insert(batch[i].item<int>());
  EXPECT_EQ(uses.size(), 64u);
  for (const int use : uses) EXPECT_TRUE(use == 1 || uses.count(use - 1) >= uses.count(use));
}

TEST(Loader, EpochOutlivesTemporaryLoader) {
  auto epoch = make_loader(Numbers(4), DataShard{}, {.num_workers = 1}).epoch(0);
  int batches = 0;
  for (auto& batch : epoch) batches += batch.target.size(0) == 1;
  EXPECT_EQ(batches, 4);
}

TEST(Loader, RejectsOptionsOutOfRange) {
  const auto message = [](const LoaderOptions& options) {
    return message_of<base::UsageError>([&] { make_loader(Numbers(4), DataShard{}, options); });
  };
  EXPECT_EQ(message({.batch_size = 0}), "LoaderOptions.batch_size is 0; expected 1 to 2147483648");
  EXPECT_THAT(message({.num_workers = -1}), HasSubstr("num_workers is -1; expected 0 to 256"));
  EXPECT_THAT(message({.prefetch = 0}), HasSubstr("prefetch is 0; expected 1 to 1024"));
  EXPECT_THAT(message({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout is 0"));
  EXPECT_EQ(message({.device = at::kCUDA}),
            "LoaderOptions.device is cuda, which libtorch cannot use in this process; expected cpu, or Group::device() "
            "after lockstep::init() found a GPU");
  EXPECT_THAT(message({.mode = ShardMode::kExact, .drop_last = true}), HasSubstr("drop_last"));
  EXPECT_THAT(message_of<base::UsageError>([] { make_loader(Numbers(0), DataShard{}); }), HasSubstr("has 0 samples"));
}

}  // namespace
}  // namespace lockstep::data
