#include "lockstep/comm/shm/gradient_table.h"

#include <numeric>
#include <vector>

#include "tests/unit/comm/shm/rank_threads_suite.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

// Three chunks, one chunk, one element, five chunks, in chunks of 256 floats.
const std::vector<std::int64_t> kCounts{700, 200, 1, 1280};
constexpr std::size_t kChunkBytes = 1024;

/// Adds up the mean of every element that it gets.
class SummingSink final : public ChunkSink {
 public:
  explicit SummingSink(std::vector<at::Tensor>& means) : means_(means) {}
  void consume(const GradientChunk& chunk) override {
    auto* mean = means_[chunk.gradient_index].mutable_data_ptr<float>() + chunk.offset;
    for (std::size_t k = 0; k < chunk.count; ++k) {
      float sum = 0;
      for (std::size_t i = 0; i < chunk.num_gradients; ++i) sum += static_cast<const float*>(chunk.gradients[i])[k];
      mean[k] += sum / static_cast<float>(chunk.divisor);  // += finds an element that two ranks consume
    }
  }
  void finish_gradient(std::size_t) override {}

 private:
  std::vector<at::Tensor>& means_;
};

/// Synchronizes the ranks.
class NoOp final : public SyncOp {
 public:
  using SyncOp::SyncOp;

 private:
  void compute() override {}
  bool is_complete_after_compute() const override { return true; }
};

/// A rank with its gradients and its table.
struct Fixture {
  RankThread& self;
  std::unique_ptr<ControlBlocks> blocks;
  std::unique_ptr<SyncOpQueue> queue;
  std::vector<at::Tensor> gradients;
  std::unique_ptr<GradientTable> table;

  explicit Fixture(RankThread& rank) : self(rank), blocks(rank.connect()) {
    queue = std::make_unique<SyncOpQueue>("test", *blocks);
    for (const std::int64_t count : kCounts) gradients.push_back(self.tensor({count}));
    table = std::make_unique<GradientTable>(
        gradients, *queue,
        GradientTable::Options{.store = self.next_store(), .timeout = 60s, .chunk_bytes = kChunkBytes});
  }

  void finish(const PendingPtr& pending) const {
    ASSERT_TRUE(pending->wait_until(Deadline::in(60s)));
    ASSERT_FALSE(pending->error());
  }
  void synchronize() const {
    const auto op = std::make_shared<NoOp>(*blocks, queue->reserve_numbers(1));
    finish(queue->add([op](Deadline deadline) { return op->advance(deadline); }));
  }
  /// Fills and publishes the gradients in an order that depends on the rank. Leaves out some in some rounds.
  void publish(std::uint32_t round) {
    for (std::size_t k = 0; k < gradients.size(); ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(self.rank)) % gradients.size();
      if (!publishes(self.rank, i, round)) continue;
      fill(gradients[i], value(self.rank, i, round));
      table->publish(i, gradients[i].mutable_data_ptr(), true);
    }
  }
  static bool publishes(int rank, std::size_t index, std::uint32_t round) {
    return round % 3 != 0 || (static_cast<std::size_t>(rank) + index) % 2 == 0;
  }
  static float value(int rank, std::size_t index, std::uint32_t round) {
    return static_cast<float>(round % 16) * static_cast<float>(rank + 1) + static_cast<float>(index);
  }
  float mean(std::size_t index, std::uint32_t round) const {
    float sum = 0;
    for (int rank = 0; rank < self.size; ++rank)
      if (publishes(rank, index, round)) sum += value(rank, index, round);
    return sum / static_cast<float>(self.size);
  }
  bool any_publishes(std::size_t index, std::uint32_t round) const {
    for (int rank = 0; rank < self.size; ++rank)
      if (publishes(rank, index, round)) return true;
    return false;
  }
};

class GradientTableThreads : public RankThreadsSuite {};
INSTANTIATE_TEST_SUITE_P(Ranks, GradientTableThreads, kAllSizesAndMappings, name_of);

TEST_P(GradientTableThreads, ReducesInPlace) {
  run([](RankThread& self) {
    Fixture ranks(self);
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      ranks.table->begin_round(round % 2 == 0 ? EarlyWork::kReduce : EarlyWork::kNone);
      ranks.publish(round);
      ranks.finish(ranks.table->finish());
      for (std::size_t i = 0; i < kCounts.size(); ++i) {
        ASSERT_EQ(ranks.table->presence()[i].dense, ranks.any_publishes(i, round));
        if (!ranks.any_publishes(i, round)) continue;
        const bool own = Fixture::publishes(self.rank, i, round);
        const void* result = own ? ranks.gradients[i].const_data_ptr() : ranks.table->mean(i);
        expect_all(static_cast<const float*>(result), kCounts[i], ranks.mean(i, round));
      }
      // A rank without a gradient has read the mean of another rank, which may now write there.
      if (ranks.table->has_remote_readers()) ranks.synchronize();
    }
  });
}

/// Every rank adds the chunks that it consumes to tensors of its own. Rank 0 adds these up: an element that two ranks
/// have consumed counts twice, one that no rank has consumed is 0.
void consume_rounds(RankThread& self, EarlyWork early, std::vector<std::vector<at::Tensor>>& means_of_rank) {
  Fixture ranks(self);
  auto& means = means_of_rank[static_cast<std::size_t>(self.rank)];
  for (const std::int64_t count : kCounts) means.push_back(self.tensor({count}));
  SummingSink sink(means);
  for (std::uint32_t round = 1; round <= kRounds; ++round) {
    for (const at::Tensor& mean : means) fill(mean, 0);
    ranks.synchronize();
    ranks.table->begin_round(early);
    if (early == EarlyWork::kConsume) ranks.table->consume_early(sink, self.size);
    ranks.publish(round);
    ranks.finish(ranks.table->finish_consuming(&sink, self.size, false));
    if (self.rank == 0)
      for (std::size_t i = 0; i < kCounts.size(); ++i) {
        std::vector<float> sum(static_cast<std::size_t>(kCounts[i]));
        for (const auto& one : means_of_rank)
          for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += one[i].const_data_ptr<float>()[k];
        expect_all(sum.data(), kCounts[i], ranks.any_publishes(i, round) ? ranks.mean(i, round) : 0);
      }
    ranks.synchronize();
  }
}

TEST_P(GradientTableThreads, ConsumesEachChunkOnce) {
  for (const EarlyWork early : {EarlyWork::kNone, EarlyWork::kConsume}) {
    std::vector<std::vector<at::Tensor>> means(static_cast<std::size_t>(size()));
    RankThreads ranks(size(), mapping());
    ranks.run([&](RankThread& self) { consume_rounds(self, early, means); });
    means.clear();
  }
}

}  // namespace
}  // namespace lockstep::comm::shm
