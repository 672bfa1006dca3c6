#include "lockstep/comm/shm/shm.h"

#include <ATen/ops/full.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/local_peers.h"
#include "lockstep/job/local_store.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/comm/shm/rank_threads_suite.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

std::shared_ptr<Transport> transport_of(RankThread& self) {
  return make_shm_transport({.local_peers = self.peers,
                             .store = self.next_store(),
                             .members = tests::all_ranks(self.size),
                             .rank = self.rank,
                             .timeout = 60s});
}

void finish(const PendingPtr& pending) {
  ASSERT_TRUE(pending->wait_until(Deadline::in(60s)));
  if (pending->error()) std::rethrow_exception(pending->error());
}

class ShmThreads : public RankThreadsSuite {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmThreads, kAllSizesAndMappings, name_of);

// A rank that is killed during init() must not look like a lack of shared memory.
TEST(LocalPeers, PeerThatEndsWhileConnectingIsNamed) {
  for (const bool accepts : {true, false}) {
    job::LocalStore store;
    auto peer = std::make_unique<base::net::AbstractListener>("lockstep-rank-");
    store.set("shm/socket/0", peer->name(), Deadline::in(10s));
    std::jthread ends([&] {
      if (accepts) peer->accept(Deadline::in(10s));  // and closes the connection
      peer.reset();
    });
    if (!accepts) ends.join();
    const auto error = tests::thrown<base::PeerLostError>(
        [&] { LocalPeers::connect(arena::Arena::this_process(), store, {0, 1}, 1, Deadline::in(10s)); });
    EXPECT_EQ(error.cause(), base::Cause::kPeerUnreachable);
    EXPECT_EQ(error.peer(), 0);
    EXPECT_STREQ(error.what(), "init: rank 0 of this host ended before all ranks had joined");
    if (ends.joinable()) ends.join();
  }
}

/// In a counter, in a control block, with a bit per chunk, in sub-operations, with a count of chunks.
const std::vector<std::int64_t> kSizes{4, 100, 5000, 300'000, 9'000'000};

TEST_P(ShmThreads, AllReduceOfEverySize) {
  run([](RankThread& self) {
    const auto transport = transport_of(self);
    for (const std::int64_t size : kSizes) {
      if (size > 1'000'000 && self.size > 3) continue;
      for (const bool in_arena : {true, false}) {
        at::Tensor tensor = in_arena ? self.tensor({size}) : at::full({size}, 0.F);
        for (int round = 1; round <= (size > 10'000 ? 3 : 20); ++round) {
          fill(tensor, static_cast<float>(round * (self.rank + 1)));
          finish(transport->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor}));
          const int all = round * self.size * (self.size + 1) / 2;
          expect_all(tensor, static_cast<float>(all));
        }
      }
    }
  });
}

TEST_P(ShmThreads, SmallOperationsWithoutAPause) {
  run([](RankThread& self) {
    const auto transport = transport_of(self);
    const at::Tensor sum = self.tensor({9});
    const at::Tensor from_root = self.tensor({700});
    const at::Tensor parts = self.tensor({self.size * 3}), part = self.tensor({3});
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      const int root = static_cast<int>(round) % self.size;
      fill(sum, static_cast<float>(round));
      fill(from_root, static_cast<float>(self.rank == root ? round : 0));
      fill(part, static_cast<float>(self.rank));
      finish(transport->start({.kind = CollectiveKind::kAllReduce, .input = sum, .output = sum}));
      finish(transport->start(
          {.kind = CollectiveKind::kBroadcast, .input = from_root, .output = from_root, .root = root}));
      finish(transport->start({.kind = CollectiveKind::kAllGather, .input = part, .output = parts}));
      finish(transport->start({.kind = CollectiveKind::kReduceScatter, .input = parts, .output = part}));
      finish(transport->start({.kind = CollectiveKind::kBarrier}));
      expect_all(sum, static_cast<float>(round) * static_cast<float>(self.size));
      expect_all(from_root, static_cast<float>(round));
      expect_all(parts.const_data_ptr<float>() + (self.size - 1) * 3, 3, static_cast<float>(self.size - 1));
      expect_all(part, static_cast<float>(self.rank * self.size));
    }
  });
}

TEST_P(ShmThreads, CheckedCallsComparedWithTheOperation) {
  run([](RankThread& self) {
    const auto transport = transport_of(self);
    const at::Tensor tensor = self.tensor({8});
    std::vector<char> all;
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      fill(tensor, static_cast<float>(1));
      // In each tenth round the last rank makes another call.
      const bool differs = round % 10 == 0;
      const char call = differs && self.rank == self.size - 1 ? 'b' : 'a';
      all.clear();
      const PendingPtr pending = transport->start_checked(
          {.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor},
          {.bytes = &call, .size = 1, .hash = static_cast<std::uint64_t>(call), .all_signatures = &all});
      ASSERT_NE(pending, nullptr);
      finish(pending);
      if (differs) {
        ASSERT_EQ(std::string(all.begin(), all.end()), std::string(static_cast<std::size_t>(self.size) - 1, 'a') + 'b');
      } else {
        ASSERT_TRUE(all.empty());
        expect_all(tensor, static_cast<float>(self.size));
      }
    }
  });
}

// The ranks begin the operation without allocating anything, and must keep what they have begun until the last one
// comes.
TEST_P(ShmThreads, CheckedCallsWaitForALateRank) {
  std::atomic<int> num_started = 0;
  run([&num_started](RankThread& self) {
    const auto transport = transport_of(self);
    int expected = 0;
    for (const std::int64_t size : {2, 100, 5000, 300'000})
      for (const bool in_arena : {true, false}) {
        const at::Tensor tensor = in_arena ? self.tensor({size}) : at::full({size}, 0.F);
        fill(tensor, static_cast<float>(self.rank + 1));
        expected += self.size - 1;
        if (self.rank == 0) {
          ASSERT_TRUE(base::poll_until(Deadline::in(60s), 1ms, [&] { return num_started >= expected; }));
        }
        std::vector<char> all;
        PendingPtr pending =
            transport->start_checked({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor},
                                     {.bytes = "a", .size = 1, .hash = 1, .all_signatures = &all});
        ASSERT_NE(pending, nullptr);
        if (self.rank != 0) {
          EXPECT_FALSE(pending->done());
          ++num_started;
        }
        finish(pending);
        pending.reset();
        expect_all(tensor, static_cast<float>(self.size * (self.size + 1) / 2));
        EXPECT_EQ(tensor.use_count(), 1) << size << " elements";  // nothing keeps it any longer
      }
  });
}

TEST_P(ShmThreads, MessagesArriveInOrder) {
  run([](RankThread& self) {
    const auto transport = transport_of(self);
    const int next = (self.rank + 1) % self.size, previous = (self.rank + self.size - 1) % self.size;
    const at::Tensor out = self.tensor({600}), in = self.tensor({600});
    const at::Tensor outside = at::full({600}, 0.F);
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      const at::Tensor& sent = round % 2 == 0 ? out : outside;  // copied into the arena if it is outside
      fill(sent, static_cast<float>(round + static_cast<std::uint32_t>(self.rank)));
      const PendingPtr send = transport->start({.kind = CollectiveKind::kSend, .input = sent, .root = next});
      finish(transport->start({.kind = CollectiveKind::kRecv, .output = in, .root = previous}));
      finish(send);
      expect_all(in, static_cast<float>(round + static_cast<std::uint32_t>(previous)));
    }
  });
}

TEST(Shm, MessageOfAnotherSizeIsAnError) {
  RankThreads(2, Mapping::kShared).run([](RankThread& self) {
    const auto transport = transport_of(self);
    const at::Tensor tensor = self.tensor({self.rank == 0 ? 3 : 4});
    const PendingPtr pending =
        transport->start(self.rank == 0 ? Collective{.kind = CollectiveKind::kSend, .input = tensor, .root = 1}
                                        : Collective{.kind = CollectiveKind::kRecv, .output = tensor});
    if (self.rank == 1) {
      ASSERT_TRUE(pending->wait_until(Deadline::in(60s)));
      EXPECT_THROW(std::rethrow_exception(pending->error()), std::runtime_error);
      self.die();
    } else {
      EXPECT_THROW(finish(pending), std::runtime_error);  // the receiver never confirms it
    }
  });
}

TEST_P(ShmThreads, AbortEndsOperationsInTheMiddle) {
  run([](RankThread& self) {
    const auto transport = transport_of(self);
    // All ranks but the last begin; another thread of each aborts.
    std::thread aborter;
    const at::Tensor tensor = self.tensor({5000});
    if (self.rank != self.size - 1) {
      const PendingPtr pending =
          transport->start({.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor});
      aborter = std::thread([&] { transport->abort(std::make_exception_ptr(std::runtime_error("stop"))); });
      EXPECT_THROW(finish(pending), std::runtime_error);
      aborter.join();
      EXPECT_THROW(finish(transport->start({.kind = CollectiveKind::kBarrier})), std::runtime_error);
    }
  });
}

TEST(Shm, DeadRankEndsAnOperation) {
  RankThreads(3, Mapping::kShared).run([](RankThread& self) {
    const auto transport = transport_of(self);
    finish(transport->start({.kind = CollectiveKind::kBarrier}));
    if (self.rank == 1) return self.die();
    EXPECT_THROW(finish(transport->start({.kind = CollectiveKind::kBarrier})), std::runtime_error);
  });
}

}  // namespace
}  // namespace lockstep::comm::shm
