#include "lockstep/comm/shm/sync_op.h"

#include <cstring>
#include <vector>

#include "tests/unit/comm/shm/rank_threads_suite.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

class SyncOpThreads : public RankThreadsSuite {};
INSTANTIATE_TEST_SUITE_P(Ranks, SyncOpThreads, kAllSizesAndMappings, name_of);

/// Each rank publishes a number and reads those of all; with two phases, it also writes one into each peer's memory.
class Exchange final : public SyncOp {
 public:
  Exchange(const ControlBlocks& control_blocks, std::uint32_t number, bool two_phases)
      : SyncOp(control_blocks, number), two_phases_(two_phases) {}

  std::uint64_t sum = 0;       // of what the ranks published
  std::uint64_t received = 0;  // the sum of what the peers wrote into this rank's memory

 private:
  std::uint64_t& value_from(int owner, int writer) const {
    auto* values = reinterpret_cast<std::uint64_t*>(control_blocks_.of(owner).inline_data[number_ % 2]);
    return values[writer + 1];
  }
  void publish() override {
    const std::uint64_t value = number_ + static_cast<std::uint64_t>(control_blocks_.rank()) * 1000;
    std::memcpy(control_blocks_.own().inline_data[number_ % 2], &value, sizeof value);
  }
  void compute() override {
    for (int member = 0; member < control_blocks_.size(); ++member) {
      std::uint64_t value = 0;
      std::memcpy(&value, control_blocks_.of(member).inline_data[number_ % 2], sizeof value);
      sum += value;
      if (two_phases_) value_from(member, control_blocks_.rank()) = number_;
    }
  }
  void complete() override {
    for (int writer = 0; writer < control_blocks_.size(); ++writer)
      received += value_from(control_blocks_.rank(), writer);
  }
  bool is_complete_after_compute() const override { return !two_phases_; }
  const bool two_phases_;
};

TEST_P(SyncOpThreads, EveryPhaseReadsWhatThePhaseBeforeWrote) {
  run([](RankThread& self) {
    const auto blocks = self.connect();
    const auto ranks = static_cast<std::uint64_t>(self.size);
    for (std::uint32_t n = 1; n <= kRounds; ++n) {
      const bool two_phases = n % 3 != 0;
      Exchange exchange(*blocks, n, two_phases);
      if (n % 2 == 0) exchange.advance(std::nullopt);
      ASSERT_TRUE(exchange.advance(Deadline::in(60s)));
      ASSERT_EQ(exchange.sum, n * ranks + 1000 * (ranks * (ranks - 1) / 2));
      if (two_phases) {
        ASSERT_EQ(exchange.received, n * ranks);
      }
    }
  });
}

TEST_P(SyncOpThreads, QueuedOperationsRunInOrder) {
  run([](RankThread& self) {
    const auto blocks = self.connect();
    SyncOpQueue queue("test", *blocks);
    std::vector<PendingPtr> pending;
    for (std::uint32_t n = 1; n <= kRounds; ++n) {
      const auto exchange = std::make_shared<Exchange>(*blocks, queue.reserve_numbers(1), true);
      pending.push_back(queue.add([exchange](Deadline deadline) { return exchange->advance(deadline); }));
      if (n % 4 == static_cast<std::uint32_t>(self.rank) % 4 || n == kRounds)
        for (const PendingPtr& one : std::exchange(pending, {})) {
          ASSERT_TRUE(one->wait_until(Deadline::in(60s)));
          ASSERT_FALSE(one->error());
        }
    }
  });
}

}  // namespace
}  // namespace lockstep::comm::shm
