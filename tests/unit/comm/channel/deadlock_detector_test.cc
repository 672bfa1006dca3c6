// Tests DeadlockDetector. Each rank is a DeadlockDetector of its own, and all share one store. The tests call poll() on
// the ranks in turn, so the results do not depend on time.
#include "lockstep/comm/channel/deadlock_detector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "lockstep/base/timeouts.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/local_store.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::channel {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using base::DesyncError;
using base::PeerLostError;
using base::TimeoutError;
using ::testing::HasSubstr;
using tests::message_of;

const std::vector<int> kBoth = {0, 1};
const std::vector<int> kThree = {0, 1, 2};

constexpr auto kLongLimit = 1h;

struct Rank {
  DeadlockDetector deadlock_detector;
  DeadlockDetector::PollState poll_state;
  WaitInfo wait_info;

  Rank(std::shared_ptr<job::Store> store, int number, std::chrono::milliseconds limit = kLongLimit)
      : deadlock_detector(std::move(store), number, "host", limit) {}
  /// Starts operation `seq` of `channel` and waits in it.
  void call(const std::string& channel, std::uint64_t seq, const std::vector<int>& members = kBoth) {
    deadlock_detector.record_start(deadlock_detector.start_counter(channel), seq);
    wait_info = {channel, seq, "all_reduce#" + std::to_string(seq), "all_reduce(" + channel + ")", &members};
  }
  void poll() { deadlock_detector.poll(wait_info, poll_state); }
  void end_wait() { deadlock_detector.end_wait(poll_state); }
};

class DeadlockDetectorTest : public ::testing::Test {
 protected:
  std::shared_ptr<job::LocalStore> store = std::make_shared<job::LocalStore>();
  Rank a{store, 0};
  Rank b{store, 1};
  Rank c{store, 2};

  /// Polls ranks a and b in turn, at most `rounds` times each. Returns the text of the first DesyncError.
  std::string poll_in_turn(int rounds = 6) {
    std::string thrown;
    for (int i = 0; i < rounds && thrown.empty(); ++i)
      for (Rank* rank : {&a, &b})
        if (thrown.empty()) thrown = message_of<DesyncError>([&] { rank->poll(); });
    return thrown;
  }
};

TEST_F(DeadlockDetectorTest, SameOperationIsNoDeadlock) {
  a.call("world", 1);
  b.call("world", 1);
  EXPECT_EQ(poll_in_turn(50), "");
}

TEST_F(DeadlockDetectorTest, MutualWaitIsADesyncOnBothRanks) {
  a.call("world", 1);
  b.call("world.0", 1);
  EXPECT_EQ(poll_in_turn(3), "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
  // The other rank reports the same.
  EXPECT_EQ(message_of<DesyncError>([&] {
              b.poll();
              b.poll();
              b.poll();
            }),
            "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
}

TEST_F(DeadlockDetectorTest, CallsThatReadAlikeAreToldApartByTheirChannels) {
  a.call("world.ddp0", 1);
  b.call("world.ddp1", 1);
  a.wait_info.text = b.wait_info.text = "backward() (gradients of weight.., reduction 1)";
  EXPECT_EQ(poll_in_turn(3),
            "rank 0 called backward() (gradients of weight.., reduction 1) of world.ddp0, rank 1 called backward() "
            "(gradients of weight.., reduction 1) of world.ddp1");
}

TEST_F(DeadlockDetectorTest, PeerAheadOnTheSameChannelIsNoDeadlock) {
  a.call("world", 1);
  b.call("world", 2);  // it has started operation 1, so its part is done
  EXPECT_EQ(poll_in_turn(10), "");
}

TEST_F(DeadlockDetectorTest, PeerWhoseWaitEndedIsNoDeadlock) {
  a.call("world", 1);
  b.call("world.0", 1, kBoth);
  a.poll();
  b.poll();
  b.end_wait();  // its wait has ended: it computes now and starts the other operation later
  for (int i = 0; i < 10; ++i) EXPECT_EQ(message_of<DesyncError>([&] { a.poll(); }), "");
}

TEST_F(DeadlockDetectorTest, StaleRecordIsNoDeadlock) {
  a.call("world", 1);
  b.call("world.0", 1, kBoth);
  b.poll();  // then b's thread is not scheduled for a while, or its wait has ended but is still published
  for (int i = 0; i < 10; ++i) EXPECT_EQ(message_of<DesyncError>([&] { a.poll(); }), "");
}

TEST_F(DeadlockDetectorTest, SuspicionRequestsOneEarlyPoll) {
  a.call("world", 1);
  b.call("world.0", 1);
  a.poll();
  EXPECT_FALSE(a.poll_state.poll_soon);  // b has published nothing
  b.poll();
  EXPECT_TRUE(std::exchange(b.poll_state.poll_soon, false));
  a.poll();
  EXPECT_TRUE(std::exchange(a.poll_state.poll_soon, false));
  a.poll();  // b has not polled again
  EXPECT_FALSE(a.poll_state.poll_soon);
}

TEST_F(DeadlockDetectorTest, SameOperationRequestsNoEarlyPoll) {
  a.call("world", 1);
  b.call("world", 1);
  poll_in_turn();
  EXPECT_FALSE(a.poll_state.poll_soon || b.poll_state.poll_soon);
}

TEST_F(DeadlockDetectorTest, PeerThatWaitsForAnotherRankIsNoDeadlock) {
  a.call("world", 1, kThree);
  const std::vector<int> others = {1, 2};
  b.call("world.0", 1, others);
  EXPECT_EQ(poll_in_turn(10), "");
}

TEST_F(DeadlockDetectorTest, SeveralStartingThreadsAreNeverBlocked) {
  a.call("world", 1);
  std::thread([&] { b.deadlock_detector.record_start(b.deadlock_detector.start_counter("world.1"), 1); }).join();
  b.call("world.0", 1);
  EXPECT_EQ(poll_in_turn(10), "");
}

TEST_F(DeadlockDetectorTest, UnawaitedAsyncOperationBlocksNothing) {
  SerialExecutor executor;
  const auto on_executor = [&](Rank& rank) {
    const PendingPtr end = executor.post([&] { rank.poll(); });
    EXPECT_TRUE(end->wait_until(Deadline::in(20s)));
    if (end->error()) std::rethrow_exception(end->error());
  };
  a.call("world", 1);
  b.call("world.0", 1);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(message_of<DesyncError>([&] { a.poll(); }), "");
    EXPECT_EQ(message_of<DesyncError>([&] { on_executor(b); }), "");
  }
  // Now the only other thread of b waits for the executor, so nothing can unblock the two ranks.
  const DeadlockDetector::ExecutorWait here(b.deadlock_detector, &executor, std::make_shared<Pending>());
  std::string thrown;
  for (int i = 0; i < 3 && thrown.empty(); ++i) {
    thrown = message_of<DesyncError>([&] { on_executor(b); });
    if (thrown.empty()) thrown = message_of<DesyncError>([&] { a.poll(); });
  }
  EXPECT_EQ(thrown, "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
}

TEST_F(DeadlockDetectorTest, OnlyWaitingForThePendingOfThisExecutorBlocks) {
  SerialExecutor executor;
  SerialExecutor other;
  const auto done = make_finished_pending();
  for (const auto& [waited_for, pending] :
       {std::pair(&other, std::make_shared<Pending>()), std::pair(&executor, done)}) {
    const DeadlockDetector::ExecutorWait here(b.deadlock_detector, waited_for, pending);
    a.call("world", 1);
    b.call("world.0", 1);
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(message_of<DesyncError>([&] { a.poll(); }), "");
      const PendingPtr end = executor.post([&] { b.poll(); });
      EXPECT_TRUE(end->wait_until(Deadline::in(20s)));
      EXPECT_EQ(end->error(), nullptr);
    }
  }
}

TEST_F(DeadlockDetectorTest, PeerThatLeftIsUnevenInput) {
  a.call("world", 2);
  b.deadlock_detector.record_start(b.deadlock_detector.start_counter("world"), 1);
  b.deadlock_detector.leave();
  const auto error = tests::thrown<CommError>([&] { a.poll(); });
  EXPECT_EQ(error.cause(), Cause::kUnevenInput);
  EXPECT_EQ(error.peer(), 1);
  EXPECT_STREQ(error.what(), "rank 1 finished while rank 0 waits for it in all_reduce(world)");
}

TEST_F(DeadlockDetectorTest, PeerThatLeftAfterItsPartIsIgnored) {
  a.call("world", 1);
  b.deadlock_detector.record_start(b.deadlock_detector.start_counter("world"), 1);
  b.deadlock_detector.leave();
  a.poll();
  store->set(job::key::exited(1), job::encode({job::ExitKind::kCode, 0}), Deadline::in(1s));
  a.poll();
}

TEST_F(DeadlockDetectorTest, EndedPeerProcessIsNamed) {
  a.call("world", 1);
  store->set(job::key::exited(1), job::encode({job::ExitKind::kCode, 0}), Deadline::in(1s));
  a.poll();  // its part may still be in transit
  store->set(job::key::exited(1), job::encode({job::ExitKind::kSignal, SIGKILL}), Deadline::in(1s));
  EXPECT_EQ(message_of<PeerLostError>([&] { a.poll(); }), "all_reduce#1: rank 1 was killed by SIGKILL");
  EXPECT_EQ(message_of<PeerLostError>([&] { a.deadlock_detector.throw_transport_failure(a.wait_info, "closed"); }),
            "all_reduce#1: rank 1 was killed by SIGKILL");
}

TEST_F(DeadlockDetectorTest, TransportFailureIsExplained) {
  a.call("world", 1);
  EXPECT_EQ(
      message_of<PeerLostError>([&] { a.deadlock_detector.throw_transport_failure(a.wait_info, "Connection reset"); }),
      "all_reduce#1: the connection to another rank ended: Connection reset");
  store->set(job::key::exited(1), job::encode({job::ExitKind::kCode, 0}), Deadline::in(1s));
  EXPECT_EQ(message_of<CommError>([&] { a.deadlock_detector.throw_transport_failure(a.wait_info, "closed"); }),
            "rank 1 ended while rank 0 waits for it in all_reduce(world)");
  b.deadlock_detector.leave();
  EXPECT_EQ(message_of<CommError>([&] { a.deadlock_detector.throw_transport_failure(a.wait_info, "closed"); }),
            "rank 1 finished while rank 0 waits for it in all_reduce(world)");
}

TEST_F(DeadlockDetectorTest, ExitStatusOutranksDeparture) {
  // A program that catches its own error in main() leaves its world before it exits.
  a.call("world", 1);
  b.deadlock_detector.leave();
  store->set(job::key::exited(1), job::encode({job::ExitKind::kCode, 3}), Deadline::in(1s));
  EXPECT_EQ(message_of<PeerLostError>([&] { a.deadlock_detector.throw_transport_failure(a.wait_info, "closed"); }),
            "all_reduce#1: rank 1 exited with code 3");
  EXPECT_EQ(message_of<PeerLostError>([&] { a.poll(); }), "all_reduce#1: rank 1 exited with code 3");
}

TEST_F(DeadlockDetectorTest, AbandonedChannelNamesTheCulprit) {
  a.call("world", 1);
  b.deadlock_detector.abandon("world.0", 1, "not this channel");
  a.poll();
  b.deadlock_detector.abandon("world", 2, "rank 2 was killed by SIGKILL");
  b.deadlock_detector.abandon("world", 1, "later");
  const auto error = tests::thrown<PeerLostError>([&] { a.poll(); });
  EXPECT_STREQ(error.what(), "all_reduce#1: rank 2 was killed by SIGKILL");
  EXPECT_EQ(error.peer(), 2);
}

TEST_F(DeadlockDetectorTest, FirstCauseEndsWaitsWithItsErrorType) {
  a.call("world", 1);
  b.deadlock_detector.publish_failure(PeerLostError(Cause::kPeerUnreachable, "op", 1, 0, "a consequence"));
  a.poll();  // a lost peer is only a consequence, so this poll does not throw
  b.deadlock_detector.publish_failure(TimeoutError(Cause::kRankStuck, "op", 1, -1, "too long", "hint"));
  b.deadlock_detector.publish_failure(DesyncError(Cause::kDesync, "op", 1, 0, "later"));
  const auto error = tests::thrown<TimeoutError>([&] { a.poll(); });
  EXPECT_STREQ(error.what(), "all_reduce#1: too long");
  EXPECT_EQ(error.peer(), 1);
  EXPECT_EQ(error.hint(), "hint");
}

TEST_F(DeadlockDetectorTest, DesyncIsPublishedUnderTheCulprit) {
  a.deadlock_detector.publish_failure(DesyncError(Cause::kDesync, "all_reduce#3", 0, 1, "they differ"));
  const auto line = store->find(job::key::kCause, Deadline::in(1s));
  ASSERT_TRUE(line);
  const auto fatal = job::parse_fatal(*line);
  EXPECT_EQ(fatal->rank, 1);
  EXPECT_EQ(fatal->op, "all_reduce#3");
  a.call("world", 1);
  EXPECT_EQ(message_of<DesyncError>([&] { a.poll(); }), "all_reduce#1: they differ");
}

TEST_F(DeadlockDetectorTest, WaitForAnyRankIsNoDeadlock) {
  // c may still send to a, although a and b wait for each other.
  a.call("any>0", 1, kThree);
  a.wait_info.any_member = true;
  b.call("world", 1, kThree);
  EXPECT_EQ(poll_in_turn(50), "");
}

TEST_F(DeadlockDetectorTest, WaitForAnyRankEndsWhenAllHaveLeft) {
  a.call("any>0", 1, kThree);
  a.wait_info.any_member = true;
  b.deadlock_detector.leave();
  const auto poll_twice = [&] {
    a.poll();
    std::this_thread::sleep_for(base::kReconnectGrace + 10ms);
    a.poll();
  };
  poll_twice();
  c.deadlock_detector.leave();
  EXPECT_EQ(message_of<CommError>(poll_twice),
            "all other ranks finished while rank 0 waits for one of them in all_reduce(any>0)");
}

TEST_F(DeadlockDetectorTest, TimeoutNamesAbsentRanks) {
  a.call("world", 4, kThree);
  b.call("world", 4, kThree);
  c.deadlock_detector.record_start(c.deadlock_detector.start_counter("world"), 3);
  b.poll();
  EXPECT_EQ(message_of<TimeoutError>([&] { a.deadlock_detector.throw_timeout(a.wait_info, a.poll_state); }),
            "all_reduce(world) did not finish in time; absent ranks: 2; other waiting ranks: 1");
  c.call("world", 4, kThree);
  c.poll();
  EXPECT_EQ(message_of<TimeoutError>([&] { a.deadlock_detector.throw_timeout(a.wait_info, a.poll_state); }),
            "all_reduce(world) did not finish in time; all ranks have started it; other waiting ranks: 1,2");
}

/// A waiting rank whose limit expires between two polls.
struct ShortLimitRank : Rank {
  explicit ShortLimitRank(std::shared_ptr<job::Store> store) : Rank(std::move(store), 0, 30ms) {}
  std::string poll_after_limit() {
    std::this_thread::sleep_for(40ms);
    return message_of<TimeoutError>([&] { poll(); });
  }
};

TEST_F(DeadlockDetectorTest, WaitEndsWithoutProgressOfAbsentRanks) {
  ShortLimitRank waits(store);
  waits.call("world", 1);
  waits.poll();
  EXPECT_EQ(waits.poll_after_limit(), "all_reduce(world) did not finish in time; absent ranks: 1");
}

TEST_F(DeadlockDetectorTest, ProgressOfAnAbsentRankExtendsTheWait) {
  ShortLimitRank waits(store);
  waits.call("world", 1);
  waits.poll();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(1), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.poll_after_limit(), "");
  }
  EXPECT_NE(waits.poll_after_limit(), "");
}

TEST_F(DeadlockDetectorTest, ProgressOfAPresentRankDoesNotExtendTheWait) {
  ShortLimitRank waits(store);
  waits.call("world", 1, kThree);
  b.call("world", 1, kThree);
  b.poll();
  waits.poll();
  store->set(job::key::progress(1), "7", Deadline::in(1s));
  EXPECT_THAT(waits.poll_after_limit(), HasSubstr("absent ranks: 2; other waiting ranks: 1"));
}

TEST_F(DeadlockDetectorTest, ProgressIsFollowedTransitively) {
  ShortLimitRank waits(store);
  const std::vector<int> others = {1, 2};
  waits.call("world", 1);
  b.call("pair", 1, others);
  b.poll();
  waits.poll();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(2), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.poll_after_limit(), "");
  }
}

TEST_F(DeadlockDetectorTest, ProgressOfTheOperationExtendsTheWait) {
  ShortLimitRank waits(store);
  waits.call("world", 1);
  b.call("world", 1);
  b.poll();
  waits.poll();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(i % 2), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.poll_after_limit(), "");
  }
  EXPECT_THAT(waits.poll_after_limit(), HasSubstr("all ranks have started it"));
}

TEST_F(DeadlockDetectorTest, ZeroLimitNeverEndsAWait) {
  Rank waits(store, 0, 0ms);
  waits.call("world", 1);
  waits.poll();
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(message_of<TimeoutError>([&] { waits.poll(); }), "");
}

TEST_F(DeadlockDetectorTest, LauncherCauseReplacesExitStatus) {
  store->set(job::key::exited(1), job::encode({job::ExitKind::kSignal, SIGTERM}), Deadline::in(1s));
  std::jthread launcher([&] {
    std::this_thread::sleep_for(100ms);
    job::publish_cause(*store, {.cause = Cause::kRankDied, .rank = 2, .detail = "killed by SIGKILL"});
  });
  a.call("world", 1);
  const auto error = tests::thrown<PeerLostError>([&] { a.poll(); });
  EXPECT_EQ(error.cause(), Cause::kRankDied);
  EXPECT_EQ(error.peer(), 2);
  EXPECT_STREQ(error.what(), "all_reduce#1: rank 2 was killed by SIGKILL");
  launcher.join();
}

TEST_F(DeadlockDetectorTest, ShortTimeoutWaitsForPeersToPublish) {
  // Both waits time out before any poll: each must find that the other rank has started the operation.
  a.call("world", 1);
  b.call("world", 1);
  std::string there;
  std::thread other(
      [&] { there = message_of<TimeoutError>([&] { b.deadlock_detector.throw_timeout(b.wait_info, b.poll_state); }); });
  const std::string here =
      message_of<TimeoutError>([&] { a.deadlock_detector.throw_timeout(a.wait_info, a.poll_state); });
  other.join();
  EXPECT_THAT(here, HasSubstr("all ranks have started it"));
  EXPECT_THAT(there, HasSubstr("all ranks have started it"));
}

TEST_F(DeadlockDetectorTest, AbsentPeersAloneAreNoError) {
  a.call("world", 1);
  for (int i = 0; i < 5; ++i) a.poll();
  a.end_wait();
  a.end_wait();
}

}  // namespace
}  // namespace lockstep::comm::channel
