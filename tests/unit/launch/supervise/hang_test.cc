#include "lockstep/launch/supervise/hang.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::launcher::supervise {
namespace {

using namespace std::chrono_literals;
using base::Cause;
using base::telemetry::RankSnapshot;
using job::health::HangKind;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

RankSnapshot rank(int number, bool waiting) {
  RankSnapshot snapshot{.rank = number, .world_size = 3, .steps = 30, .waiting = waiting};
  snapshot.operations.push_back(
      {.number = 1, .seq = 1, .started = 1, .ended = 2, .channel = "world", .kind = "barrier"});
  if (waiting)
    snapshot.operations.push_back(
        {.number = 2, .seq = 2, .started = 3, .channel = "world", .kind = "all_reduce", .name = "fc"});
  return snapshot;
}

const HangEvidence kEvidence{.limits = {.stall = 30s, .hang = 300s},
                             .run_dir = "runs/it",
                             .locations = {{"alpha", 100}, {"alpha", 101}, {"alpha", 102}}};

TEST(Hang, RankInUserCodeIsBlamed) {
  const Verdict verdict =
      judge_hang({HangKind::kHang, {0, 1, 2}}, {}, {rank(0, true), rank(1, true), rank(2, false)}, kEvidence);
  EXPECT_EQ(verdict.exit_code, 124);
  EXPECT_THAT(verdict.stacks, ElementsAre(2));
  EXPECT_EQ(verdict.fatal.rank, 2);
  EXPECT_EQ(verdict.fatal.pid, 102);
  EXPECT_EQ(verdict.fatal.host, "alpha");
  EXPECT_EQ(verdict.fatal.detail,
            "no progress for 300 s; ranks 0,1 wait in all_reduce(fc)#2 of world; rank 2 finished 30 steps and is in "
            "user code");
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("its stack is in runs/it/stack.2.txt"));
}

TEST(Hang, StuckAndStoppedRankIsReported) {
  const std::map<int, job::health::RankHealth> health = {{2, {.rank = 2, .process_state = 'T'}}};
  const Verdict verdict =
      judge_hang({HangKind::kHang, {0, 1, 2}}, health, {rank(0, true), rank(1, true), rank(2, false)}, kEvidence);
  EXPECT_THAT(verdict.fatal.detail,
              HasSubstr("no progress for 300 s; the process is stopped by a signal (state T); ranks 0,1 wait"));
}

TEST(Hang, AllRanksAreBlamedWhenAllWaitInOneOperation) {
  const Verdict verdict = judge_hang({HangKind::kHang, {0, 1}}, {}, {rank(0, true), rank(1, true)}, kEvidence);
  EXPECT_THAT(verdict.stacks, ElementsAre(0, 1));
  EXPECT_THAT(verdict.fatal.detail, HasSubstr("rank 0 finished 30 steps and waits in all_reduce(fc)#2"));
}

/// A rank that is watched from outside.
RankSnapshot watched(int number, const std::string& kind, std::uint64_t bytes, const std::string& channel = "world") {
  RankSnapshot snapshot{.rank = number, .world_size = 3, .transport = "torch.distributed, gloo", .waiting = true};
  snapshot.operations.push_back(
      {.number = 1, .seq = 7, .bytes = bytes, .started = 3, .channel = channel, .kind = kind, .dtype = "float32"});
  return snapshot;
}

TEST(Hang, DifferentCallsOfRanksThatAreWatchedAreADesync) {
  const auto judge = [](const std::vector<RankSnapshot>& ranks) {
    return judge_hang({HangKind::kHang, {0, 1, 2}}, {}, ranks, kEvidence);
  };
  const Verdict kinds = judge({watched(0, "barrier", 0), watched(1, "all_reduce", 8), watched(2, "all_reduce", 8)});
  EXPECT_EQ(kinds.exit_code, base::exit_code(Cause::kDesync));
  EXPECT_EQ(kinds.fatal.cause, Cause::kDesync);
  EXPECT_EQ(kinds.fatal.rank, 0);
  EXPECT_EQ(kinds.fatal.detail,
            "ranks 1,2 called all_reduce(8 bytes of float32), rank 0 called barrier() as operation 7 of world");
  const Verdict sizes = judge({watched(0, "all_reduce", 8), watched(1, "all_reduce", 16)});
  EXPECT_EQ(sizes.fatal.cause, Cause::kDesync);
  EXPECT_EQ(sizes.fatal.rank, 1);
  // Not comparable: another size of an all_to_all, other groups, other calls of Python, and a rank that waits for none.
  EXPECT_EQ(judge({watched(0, "all_to_all", 8), watched(1, "all_to_all", 16)}).fatal.cause, Cause::kRankStuck);
  EXPECT_EQ(judge({watched(0, "barrier", 0, "a"), watched(1, "all_reduce", 8, "b")}).fatal.cause, Cause::kRankStuck);
  EXPECT_EQ(judge({watched(0, "send", 0, "Python calls"), watched(1, "recv", 0, "Python calls")}).fatal.cause,
            Cause::kRankStuck);
  EXPECT_EQ(judge({watched(0, "barrier", 0), watched(1, "all_reduce", 8), rank(2, false)}).fatal.rank, 2);
}

TEST(Hang, RankThatWaitsWhileItHandlesAnExceptionHasFailed) {
  const auto judge = [](const std::vector<RankSnapshot>& ranks) {
    return judge_hang({HangKind::kHang, {0, 1, 2}}, {}, ranks, kEvidence);
  };
  RankSnapshot failed = watched(0, "barrier", 0);
  failed.handles = "ValueError: No space left on device";
  const Verdict desync = judge({failed, watched(1, "all_reduce", 8)});
  EXPECT_EQ(desync.fatal.cause, Cause::kRankExited);
  EXPECT_EQ(desync.fatal.rank, 0);
  EXPECT_EQ(desync.exit_code, 1);
  EXPECT_THAT(desync.stacks, ElementsAre(0));
  EXPECT_EQ(desync.fatal.detail,
            "ValueError: No space left on device; then rank 0 called barrier(), rank 1 called all_reduce(8 bytes of "
            "float32) as operation 7 of world");
  EXPECT_THAT(desync.fatal.hint, HasSubstr("see df"));
  failed.handles = "ValueError: x";
  EXPECT_THAT(judge({failed, watched(1, "all_reduce", 8)}).fatal.hint, HasSubstr("finally"));
  // Another rank is at fault: this one waits for it.
  EXPECT_EQ(judge({failed, watched(1, "barrier", 0), rank(2, false)}).fatal.rank, 2);
  // Most ranks make its call.
  EXPECT_EQ(judge({failed, watched(1, "barrier", 0), watched(2, "all_reduce", 8)}).fatal.cause, Cause::kDesync);
  // A program that trains in an except block.
  RankSnapshot other = watched(1, "all_reduce", 8);
  other.handles = failed.handles;
  EXPECT_EQ(judge({failed, other}).fatal.cause, Cause::kDesync);
  // It is not shown as waiting.
  failed.waiting = false;
  EXPECT_EQ(judge({failed, watched(1, "all_reduce", 8)}).fatal.cause, Cause::kRankStuck);
}

TEST(Hang, StacksWithoutAFileArePrinted) {
  Verdict verdict =
      judge_hang({HangKind::kHang, {0, 1, 2}}, {}, {rank(0, true), rank(1, true), rank(2, false)}, kEvidence);
  add_stacks(verdict, 1, "cannot write runs/it/stack.1.txt: Read-only file system\n");
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("its stack is in runs/it/stack.2.txt; "));
  add_stacks(verdict, 2, "cannot write runs/it/stack.2.txt: Read-only file system\n  File \"a.py\", line 1 in f\x1b\n");
  EXPECT_THAT(verdict.fatal.hint, AllOf(HasSubstr("its stack is above; "), Not(HasSubstr("stack.2.txt"))));
  EXPECT_EQ(verdict.printed_stacks,
            "lockstep: stacks of rank 1:\n  cannot write runs/it/stack.1.txt: Read-only file system\n"
            "lockstep: stacks of rank 2:\n  cannot write runs/it/stack.2.txt: Read-only file system\n"
            "    File \"a.py\", line 1 in f\\x1b\n");
}

TEST(Hang, RankThatHasNotJoinedIsBlamed) {
  const std::map<int, job::health::RankHealth> health = {
      {0, {.rank = 0}}, {1, {.rank = 1, .phase = job::health::RankPhase::kBeforeWorld}}};
  const Verdict verdict = judge_hang({HangKind::kHang, {0, 1}}, health, {rank(0, true)}, kEvidence);
  EXPECT_EQ(verdict.fatal.rank, 1);
  EXPECT_THAT(verdict.fatal.detail, HasSubstr("rank 1 has not joined the world"));
}

TEST(Hang, RankThatHasLeftAndDoesNotEnd) {
  RankSnapshot left = rank(1, false);
  left.has_left = true;
  const Verdict verdict = judge_hang({HangKind::kHang, {1}}, {}, {left}, kEvidence);
  EXPECT_EQ(verdict.fatal.rank, 1);
  EXPECT_THAT(verdict.fatal.detail, HasSubstr("rank 1 has left its world, and its process has not ended"));
}

TEST(Hang, RankThatWorksForTooLongIsBlamed) {
  HangEvidence evidence = kEvidence;
  evidence.limits.work = 20s;
  Verdict verdict = judge_hang({HangKind::kWork, {2}}, {}, {rank(0, true), rank(1, true), rank(2, false)}, evidence);
  add_python_location(verdict, 0, "other.py:1 in f");
  add_python_location(verdict, 2, "train.py:42 in main");
  EXPECT_EQ(verdict.exit_code, 124);
  EXPECT_EQ(verdict.fatal.rank, 2);
  EXPECT_EQ(verdict.fatal.detail,
            "it has worked for 20 s without reporting progress; ranks 0,1 wait in all_reduce(fc)#2 of world; rank 2 "
            "finished 30 steps and is in user code; it is at train.py:42 in main");
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("--work-timeout"));
}

TEST(Hang, IdleRanks) {
  HangEvidence evidence = kEvidence;
  evidence.limits.idle = 60s;
  const Verdict verdict = judge_hang({HangKind::kIdle, {0, 1}}, {}, {}, evidence);
  EXPECT_EQ(verdict.fatal.detail, "no process of any rank has used CPU time for 60 s");
  EXPECT_THAT(verdict.stacks, ElementsAre(0, 1));
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("--idle-timeout"));
}

TEST(Hang, NumberOfStacksIsLimited) {
  std::vector<RankSnapshot> ranks;
  std::vector<int> numbers;
  for (int i = 0; i < 40; ++i) {
    ranks.push_back(rank(i, false));
    numbers.push_back(i);
  }
  EXPECT_EQ(judge_hang({HangKind::kHang, numbers}, {}, ranks, kEvidence).stacks.size(), 8u);
}

TEST(Hang, SilentRankIsBlamedBeforeWaitingRanks) {
  const std::map<int, job::health::RankHealth> health = {
      {1, {.rank = 1, .since_heartbeat = 31s, .since_progress = 31s, .process_state = 'T'}}};
  const Verdict verdict =
      judge_hang({HangKind::kStall, {1}}, health, {rank(0, true), rank(1, false), rank(2, true)}, kEvidence);
  EXPECT_EQ(verdict.exit_code, 124);
  EXPECT_EQ(verdict.fatal.cause, Cause::kRankStalled);
  EXPECT_EQ(verdict.fatal.rank, 1);
  EXPECT_EQ(verdict.fatal.detail,
            "no heartbeat for 30 s; the process is stopped by a signal (state T); ranks 0,2 wait in all_reduce(fc)#2 "
            "of world");
}

TEST(Hang, HangFindingIsUsedWithoutOperations) {
  const Verdict verdict = judge_hang({HangKind::kHang, {1, 2}}, {}, {}, kEvidence);
  EXPECT_EQ(verdict.fatal.rank, 1);
  EXPECT_EQ(verdict.fatal.detail, "no progress for 300 s");
}

TEST(Hang, WarningStatesTheStallTimeout) {
  const auto warning = stall_warning({.rank = 1, .since_heartbeat = 5200ms, .process_state = 'D'}, kEvidence.locations,
                                     kEvidence.limits);
  EXPECT_THAT(job::format_warning(warning),
              AllOf(HasSubstr("WARN cause=RANK_STALLED rank=1 host=alpha pid=101"),
                    HasSubstr("no heartbeat for 5 s; the process is blocked in the kernel"),
                    HasSubstr("after 30 s without a heartbeat (--stall-timeout)")));
}

TEST(Verdict, StepAndOperationAreAdded) {
  job::Fatal fatal;
  fatal.rank = 1;
  add_step_and_operation(fatal, {rank(0, false), rank(1, true)});
  EXPECT_EQ(fatal.op, "all_reduce(fc)#2");
  EXPECT_EQ(fatal.step, 30);
  fatal.op = "init";
  fatal.step = 4;
  add_step_and_operation(fatal, {rank(1, true)});
  EXPECT_EQ(fatal.op, "init");
  EXPECT_EQ(fatal.step, 4);
  fatal = {};
  add_step_and_operation(fatal, {rank(1, true)});
  EXPECT_EQ(fatal.step, -1);
}

}  // namespace
}  // namespace lockstep::launcher::supervise
