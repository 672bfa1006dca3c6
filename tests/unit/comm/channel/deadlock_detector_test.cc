// Waits that look at each other. Every rank is a Watch of its own at one table; its looks are called in turn, so
// nothing here depends on time.
#include "lockstep/comm/channel/deadlock_detector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/local_store.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::CommError;
using base::Deadline;
using base::DesyncError;
using base::PeerLost;
using base::TimeoutError;
using ::testing::HasSubstr;
using tests::message_of;

const std::vector<int> kBoth = {0, 1};
const std::vector<int> kThree = {0, 1, 2};

constexpr auto kLongLimit = 1h;

struct Rank {
  Watch watch;
  Watch::Looks looks;
  Waiting waiting;

  Rank(std::shared_ptr<job::Store> store, int number, std::chrono::milliseconds limit = kLongLimit)
      : watch(std::move(store), number, "host", limit) {}
  /// Starts operation `seq` of `channel` and waits in it.
  void call(const std::string& channel, std::uint64_t seq, const std::vector<int>& members = kBoth) {
    watch.started(watch.count_of(channel), seq);
    waiting = {channel, seq, "all_reduce#" + std::to_string(seq), "all_reduce(" + channel + ")", &members};
  }
  void look() { watch.look(waiting, looks); }
  void end() { watch.end(looks); }
};

class WatchTest : public ::testing::Test {
 protected:
  std::shared_ptr<job::LocalStore> store = std::make_shared<job::LocalStore>();
  Rank a{store, 0};
  Rank b{store, 1};
  Rank c{store, 2};

  /// Looks in turn; who threw what within `rounds`.
  std::string look_in_turn(int rounds = 6) {
    std::string thrown;
    for (int i = 0; i < rounds && thrown.empty(); ++i)
      for (Rank* rank : {&a, &b})
        if (thrown.empty()) thrown = message_of<DesyncError>([&] { rank->look(); });
    return thrown;
  }
};

TEST_F(WatchTest, RanksInOneOperationWaitForEver) {
  a.call("world", 1);
  b.call("world", 1);
  EXPECT_EQ(look_in_turn(50), "");
}

TEST_F(WatchTest, TwoThatWaitForEachOtherAreToldBoth) {
  a.call("world", 1);
  b.call("world.0", 1);
  EXPECT_EQ(look_in_turn(3), "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
  // The other finds the same.
  EXPECT_EQ(message_of<DesyncError>([&] {
              b.look();
              b.look();
              b.look();
            }),
            "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
}

TEST_F(WatchTest, OneWhoIsAheadOnTheSameChannelIsNotAccused) {
  a.call("world", 1);
  b.call("world", 2);  // it has started 1: its part is done
  EXPECT_EQ(look_in_turn(10), "");
}

TEST_F(WatchTest, APeerThatMovesOnIsNotAccused) {
  a.call("world", 1);
  b.call("world.0", 1, kBoth);
  a.look();
  b.look();
  b.end();  // its wait ended after all: it computes now, and starts the other operation later
  for (int i = 0; i < 10; ++i) EXPECT_EQ(message_of<DesyncError>([&] { a.look(); }), "");
}

TEST_F(WatchTest, ARecordThatStandsStillProvesNothing) {
  a.call("world", 1);
  b.call("world.0", 1, kBoth);
  b.look();  // and then b's thread is not scheduled for a while, or has been released and not said so yet
  for (int i = 0; i < 10; ++i) EXPECT_EQ(message_of<DesyncError>([&] { a.look(); }), "");
}

TEST_F(WatchTest, ASuspicionAsksOnceForALookSoon) {
  a.call("world", 1);
  b.call("world.0", 1);
  a.look();
  EXPECT_FALSE(a.looks.soon);  // b has said nothing yet
  b.look();
  EXPECT_TRUE(std::exchange(b.looks.soon, false));
  a.look();
  EXPECT_TRUE(std::exchange(a.looks.soon, false));
  a.look();  // b has not looked again
  EXPECT_FALSE(a.looks.soon);
}

TEST_F(WatchTest, NobodyHurriesInOneOperation) {
  a.call("world", 1);
  b.call("world", 1);
  look_in_turn();
  EXPECT_FALSE(a.looks.soon || b.looks.soon);
}

TEST_F(WatchTest, APeerThatWaitsForSomebodyElseIsNotAccused) {
  a.call("world", 1, kThree);
  const std::vector<int> others = {1, 2};
  b.call("world.0", 1, others);
  EXPECT_EQ(look_in_turn(10), "");
}

TEST_F(WatchTest, AProcessWithSeveralThreadsIsNotBlockedByOne) {
  a.call("world", 1);
  std::thread([&] { b.watch.started(b.watch.count_of("world.1"), 1); }).join();
  b.call("world.0", 1);
  EXPECT_EQ(look_in_turn(10), "");
}

TEST_F(WatchTest, AnOperationThatNobodyWaitsForBlocksNothing) {
  Lane lane;
  const auto on_lane = [&](Rank& rank) {
    const PendingPtr end = lane.post([&] { rank.look(); });
    EXPECT_TRUE(end->wait_until(Deadline::in(20s)));
    if (end->error()) std::rethrow_exception(end->error());
  };
  a.call("world", 1);
  b.call("world.0", 1);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(message_of<DesyncError>([&] { a.look(); }), "");
    EXPECT_EQ(message_of<DesyncError>([&] { on_lane(b); }), "");
  }
  // Until its only thread waits for that lane.
  const Watch::LaneWait here(b.watch, &lane, std::make_shared<Pending>());
  std::string thrown;
  for (int i = 0; i < 3 && thrown.empty(); ++i) {
    thrown = message_of<DesyncError>([&] { on_lane(b); });
    if (thrown.empty()) thrown = message_of<DesyncError>([&] { a.look(); });
  }
  EXPECT_EQ(thrown, "rank 0 called all_reduce(world), rank 1 called all_reduce(world.0)");
}

TEST_F(WatchTest, WaitingForAnotherLaneOrForWhatIsDoneBlocksNothing) {
  Lane lane;
  Lane other;
  const auto done = finished();
  for (const auto& [waited_for, pending] : {std::pair(&other, std::make_shared<Pending>()), std::pair(&lane, done)}) {
    const Watch::LaneWait here(b.watch, waited_for, pending);
    a.call("world", 1);
    b.call("world.0", 1);
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(message_of<DesyncError>([&] { a.look(); }), "");
      const PendingPtr end = lane.post([&] { b.look(); });
      EXPECT_TRUE(end->wait_until(Deadline::in(20s)));
      EXPECT_EQ(end->error(), nullptr);
    }
  }
}

TEST_F(WatchTest, APeerThatLeftIsUneven) {
  a.call("world", 2);
  b.watch.started(b.watch.count_of("world"), 1);
  b.watch.leave();
  try {
    a.look();
    FAIL();
  } catch (const CommError& error) {
    EXPECT_EQ(error.cause(), Cause::kUnevenInput);
    EXPECT_EQ(error.peer(), 1);
    EXPECT_STREQ(error.what(), "rank 1 finished while rank 0 waits for it in all_reduce(world)");
  }
}

TEST_F(WatchTest, APeerThatLeftAfterItsPartIsNotMissed) {
  a.call("world", 1);
  b.watch.started(b.watch.count_of("world"), 1);
  b.watch.leave();
  a.look();
  store->set(job::key::exited(1), "exited with code 0", Deadline::in(1s));
  a.look();
}

TEST_F(WatchTest, APeerWhoseProcessEndedIsNamed) {
  a.call("world", 1);
  store->set(job::key::exited(1), "exited with code 0", Deadline::in(1s));
  a.look();  // its part may still be on the wire
  store->set(job::key::exited(1), "killed by SIGKILL", Deadline::in(1s));
  EXPECT_EQ(message_of<PeerLost>([&] { a.look(); }), "all_reduce#1: rank 1 was killed by SIGKILL");
  EXPECT_EQ(message_of<PeerLost>([&] { a.watch.wire_failed(a.waiting, "closed"); }),
            "all_reduce#1: rank 1 was killed by SIGKILL");
}

TEST_F(WatchTest, AFailedWireIsExplained) {
  a.call("world", 1);
  EXPECT_EQ(message_of<PeerLost>([&] { a.watch.wire_failed(a.waiting, "Connection reset"); }),
            "all_reduce#1: the connection to another rank ended: Connection reset");
  store->set(job::key::exited(1), "exited with code 0", Deadline::in(1s));
  EXPECT_EQ(message_of<CommError>([&] { a.watch.wire_failed(a.waiting, "closed"); }),
            "rank 1 ended while rank 0 waits for it in all_reduce(world)");
  b.watch.leave();
  EXPECT_EQ(message_of<CommError>([&] { a.watch.wire_failed(a.waiting, "closed"); }),
            "rank 1 finished while rank 0 waits for it in all_reduce(world)");
}

TEST_F(WatchTest, HowAProcessEndedOutranksThatItLeft) {
  // A program that catches its own error in main() closes its world on the way out.
  a.call("world", 1);
  b.watch.leave();
  store->set(job::key::exited(1), "exited with code 3", Deadline::in(1s));
  EXPECT_EQ(message_of<PeerLost>([&] { a.watch.wire_failed(a.waiting, "closed"); }),
            "all_reduce#1: rank 1 exited with code 3");
  EXPECT_EQ(message_of<PeerLost>([&] { a.look(); }), "all_reduce#1: rank 1 exited with code 3");
}

TEST_F(WatchTest, WhoAbandonsAChannelTellsWhoseFaultItIs) {
  a.call("world", 1);
  b.watch.abandon("world.0", 1, "not this channel");
  a.look();
  b.watch.abandon("world", 2, "rank 2 was killed by SIGKILL");
  b.watch.abandon("world", 1, "later");
  try {
    a.look();
    FAIL();
  } catch (const PeerLost& error) {
    EXPECT_STREQ(error.what(), "all_reduce#1: rank 2 was killed by SIGKILL");
    EXPECT_EQ(error.peer(), 2);
  }
}

TEST_F(WatchTest, TheFirstCauseEndsEveryWaitByItsType) {
  a.call("world", 1);
  b.watch.publish(PeerLost(Cause::kPeerUnreachable, "op", 1, 0, "a consequence"));
  a.look();  // a lost peer is no cause
  b.watch.publish(TimeoutError(Cause::kRankStuck, "op", 1, -1, "too long", "hint"));
  b.watch.publish(DesyncError(Cause::kDesync, "op", 1, 0, "later"));
  try {
    a.look();
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_STREQ(error.what(), "all_reduce#1: too long");
    EXPECT_EQ(error.peer(), 1);
    EXPECT_EQ(error.hint(), "hint");
  }
}

TEST_F(WatchTest, ADifferenceIsPublishedUnderTheRankAtFault) {
  a.watch.publish(DesyncError(Cause::kDesync, "all_reduce#3", 0, 1, "they differ"));
  const auto line = store->find(job::key::kCause, Deadline::in(1s));
  ASSERT_TRUE(line);
  const auto fatal = job::parse_fatal(*line);
  EXPECT_EQ(fatal->rank, 1);
  EXPECT_EQ(fatal->op, "all_reduce#3");
  a.call("world", 1);
  EXPECT_EQ(message_of<DesyncError>([&] { a.look(); }), "all_reduce#1: they differ");
}

TEST_F(WatchTest, ATimeoutNamesWhoHasNotCome) {
  a.call("world", 4, kThree);
  b.call("world", 4, kThree);
  c.watch.started(c.watch.count_of("world"), 3);
  b.look();
  EXPECT_EQ(message_of<TimeoutError>([&] { a.watch.timed_out(a.waiting, a.looks); }),
            "no end of all_reduce(world) before its deadline; ranks that have not come: 2; ranks that wait too: 1");
  c.call("world", 4, kThree);
  c.look();
  EXPECT_EQ(message_of<TimeoutError>([&] { a.watch.timed_out(a.waiting, a.looks); }),
            "no end of all_reduce(world) before its deadline; all ranks have come; ranks that wait too: 1,2");
}

/// A rank that waits, with a limit that passes between two looks.
struct Impatient : Rank {
  explicit Impatient(std::shared_ptr<job::Store> store) : Rank(std::move(store), 0, 30ms) {}
  std::string look_later() {
    std::this_thread::sleep_for(40ms);
    return message_of<TimeoutError>([&] { look(); });
  }
};

TEST_F(WatchTest, AWaitEndsWhenThoseWhoHaveNotComeDoNotGetOn) {
  Impatient waits(store);
  waits.call("world", 1);
  waits.look();
  EXPECT_EQ(waits.look_later(), "no end of all_reduce(world) before its deadline; ranks that have not come: 1");
}

TEST_F(WatchTest, AWaitLastsWhileWhoeverHasNotComeGetsOn) {
  Impatient waits(store);
  waits.call("world", 1);
  waits.look();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(1), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.look_later(), "");
  }
  EXPECT_NE(waits.look_later(), "");
}

TEST_F(WatchTest, ProgressOfWhoHasComeIsNoReasonToWait) {
  Impatient waits(store);
  waits.call("world", 1, kThree);
  b.call("world", 1, kThree);
  b.look();
  waits.look();
  store->set(job::key::progress(1), "7", Deadline::in(1s));
  EXPECT_THAT(waits.look_later(), HasSubstr("ranks that have not come: 2; ranks that wait too: 1"));
}

TEST_F(WatchTest, AWaitLastsWhileSomebodyGetsOnForWhomTheAbsentWait) {
  Impatient waits(store);
  const std::vector<int> others = {1, 2};
  waits.call("world", 1);
  b.call("pair", 1, others);
  b.look();
  waits.look();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(2), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.look_later(), "");
  }
}

TEST_F(WatchTest, AWaitOfAllLastsWhileTheOperationGetsOn) {
  Impatient waits(store);
  waits.call("world", 1);
  b.call("world", 1);
  b.look();
  waits.look();
  for (int i = 0; i < 5; ++i) {
    store->set(job::key::progress(i % 2), std::to_string(i), Deadline::in(1s));
    EXPECT_EQ(waits.look_later(), "");
  }
  EXPECT_THAT(waits.look_later(), HasSubstr("all ranks have come"));
}

TEST_F(WatchTest, NoLimitNoEnd) {
  Rank waits(store, 0, 0ms);
  waits.call("world", 1);
  waits.look();
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(message_of<TimeoutError>([&] { waits.look(); }), "");
}

TEST_F(WatchTest, TheEndOfARankIsToldAsTheLauncherSaysIt) {
  store->set(job::key::exited(1), "killed by SIGTERM", Deadline::in(1s));
  std::thread launcher([&] {
    std::this_thread::sleep_for(100ms);
    job::publish_cause(*store, {.cause = Cause::kRankDied, .rank = 2, .detail = "killed by SIGKILL"});
  });
  a.call("world", 1);
  try {
    a.look();
    ADD_FAILURE();
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.cause(), Cause::kRankDied);
    EXPECT_EQ(error.peer(), 2);
    EXPECT_STREQ(error.what(), "all_reduce#1: rank 2 was killed by SIGKILL");
  }
  launcher.join();
}

TEST_F(WatchTest, AShortTimeoutHearsTheOthersFirst) {
  // Both give up before anybody has looked: each must hear that the other had come.
  a.call("world", 1);
  b.call("world", 1);
  std::string there;
  std::thread other([&] { there = message_of<TimeoutError>([&] { b.watch.timed_out(b.waiting, b.looks); }); });
  const std::string here = message_of<TimeoutError>([&] { a.watch.timed_out(a.waiting, a.looks); });
  other.join();
  EXPECT_THAT(here, HasSubstr("all ranks have come"));
  EXPECT_THAT(there, HasSubstr("all ranks have come"));
}

TEST_F(WatchTest, NobodyIsThereIsNoFault) {
  a.call("world", 1);
  for (int i = 0; i < 5; ++i) a.look();
  a.end();
  a.end();
}

}  // namespace
}  // namespace lockstep::comm
