#include "lockstep/job/health/progress_report.h"

#include <gtest/gtest.h>

namespace lockstep::job::health {
namespace {

using base::telemetry::OperationRecord;
using base::telemetry::RankSnapshot;

constexpr std::int64_t kSecond = 1000000000;

/// Makes a record from times in seconds; `ended` is 0 while the operation runs.
OperationRecord operation(std::uint64_t seq, const std::string& kind, const std::string& name, std::int64_t started,
                          std::int64_t ended, const std::string& channel = "world") {
  return {.number = seq,
          .seq = seq,
          .bytes = 4096,
          .started = started * kSecond,
          .ended = ended * kSecond,
          .channel = channel,
          .kind = kind,
          .dtype = "float32",
          .name = name};
}

RankSnapshot rank(int number, std::int64_t steps, std::vector<OperationRecord> operations) {
  const bool waiting = !operations.empty() && operations.back().is_running();
  return {.rank = number,
          .world_size = 3,
          .steps = steps,
          .waiting = waiting,
          .read_at_ns = 100 * kSecond,
          .operations = std::move(operations)};
}

TEST(ProgressReport, DescribesAnOperation) {
  EXPECT_EQ(describe(operation(12, "all_reduce", "fc.weight", 1, 0)),
            "all_reduce(fc.weight)#12 of world, 4096 bytes of float32");
  OperationRecord barrier = operation(3, "barrier", "", 1, 0);
  barrier.bytes = 0;
  EXPECT_EQ(describe(barrier), "barrier#3 of world");
  OperationRecord gradients = operation(4, "gradients", "fc.weight..", 1, 0, "world.ddp0");
  gradients.dtype.clear();
  EXPECT_EQ(describe(gradients), "gradients(fc.weight..)#4 of world.ddp0, 4096 bytes");
}

TEST(ProgressReport, ListsWhereRanksAreAndWhoIsMissing) {
  const auto waiting = [](int number, std::int64_t since) {
    return rank(number, 31, {operation(56, "all_reduce", "", 70, 80), operation(57, "barrier", "", since, 0)});
  };
  const std::string text =
      progress_report({waiting(0, 90), rank(1, 30, {operation(56, "all_reduce", "", 70, 81)}), waiting(2, 88)});
  EXPECT_EQ(text,
            "  ranks 0,2, step 31: waits in barrier#57 of world, 4096 bytes of float32; last finished all_reduce#56 of "
            "world, 4096 bytes of float32; for 10.0 s to 12.0 s\n"
            "  rank 1, step 30: in user code; last finished all_reduce#56 of world, 4096 bytes of float32; for 19.0 s\n"
            "  rank 1 has not reached barrier#57 of world, 4096 bytes of float32\n");
}

TEST(ProgressReport, RanksInDifferentGroups) {
  const std::string text = progress_report(
      {rank(0, 1, {operation(1, "all_reduce", "", 70, 80, "a"), operation(2, "all_reduce", "", 90, 0, "a")}),
       rank(1, 1, {operation(1, "all_reduce", "", 70, 80, "a"), operation(1, "broadcast", "", 90, 0, "b")}),
       rank(2, 1, {})});
  EXPECT_NE(text.find("rank 1 has not reached all_reduce#2 of a"), std::string::npos) << text;
  EXPECT_EQ(text.find("not reached broadcast"), std::string::npos) << text;  // no other rank is known to be in b
  EXPECT_NE(text.find("rank 2, step 1: in user code; for 0.0 s"), std::string::npos) << text;
}

TEST(ProgressReport, OldestRunningOperationIsCurrent) {
  RankSnapshot one = rank(0, 0,
                          {operation(1, "all_gather", "", 70, 0), operation(1, "all_reduce", "", 71, 0, "b"),
                           operation(2, "barrier", "", 72, 73, "b")});
  one.waiting = true;
  EXPECT_EQ(progress_report({one}),
            "  rank 0, step 0: waits in all_gather#1 of world, 4096 bytes of float32; last finished barrier#2 of b, "
            "4096 bytes of float32; for 30.0 s\n");
}

TEST(ProgressReport, RankThatDoesNotWaitMayBeInAnOperation) {
  RankSnapshot one = rank(0, 7, {operation(1, "gradients", "fc", 70, 0)});
  one.waiting = false;
  EXPECT_EQ(progress_report({one}),
            "  rank 0, step 7: in gradients(fc)#1 of world, 4096 bytes of float32; for 30.0 s\n");
  one.busy_with = "evaluate";
  EXPECT_NE(progress_report({one}).find("4096 bytes of float32, busy with evaluate; for"), std::string::npos);
  one.operations.clear();
  EXPECT_NE(progress_report({one}).find("step 7: busy with evaluate;"), std::string::npos);
  one.has_left = true;
  EXPECT_NE(progress_report({one}).find("step 7: has left;"), std::string::npos);
}

TEST(ProgressReport, IdleRankIsMissingFromWorldOperations) {
  const auto waits_in = [](const std::string& channel) {
    return rank(0, 0, {operation(1, "barrier", "", 70, 0, channel)});
  };
  for (const std::string channel : {"world", "world.ddp0"})
    EXPECT_NE(
        progress_report({waits_in(channel), rank(1, 0, {})}).find("rank 1 has not reached barrier#1 of " + channel),
        std::string::npos);
  for (const std::string channel : {"world.0[1]", "world.0[1].ddp0"})
    EXPECT_EQ(progress_report({waits_in(channel), rank(1, 0, {})}).find("not reached"), std::string::npos);
  RankSnapshot left = rank(1, 0, {});
  left.has_left = true;
  EXPECT_EQ(progress_report({waits_in("world"), left}).find("not reached"), std::string::npos);
}

TEST(ProgressReport, AbandonedOperationIsCurrentUntilTheNext) {
  OperationRecord broken = operation(4, "gradients", "fc", 70, 0, "world.ddp0");
  broken.ended = base::telemetry::FlightRing::kAbandoned;
  RankSnapshot one = rank(0, 7, {operation(3, "gradients", "fc", 60, 61, "world.ddp0"), broken});
  one.waiting = false;
  EXPECT_EQ(progress_report({one}),
            "  rank 0, step 7: abandoned gradients(fc)#4 of world.ddp0, 4096 bytes of float32; last finished "
            "gradients(fc)#3 of world.ddp0, 4096 bytes of float32; for 30.0 s\n");
  one.operations.push_back(operation(1, "gradients", "fc", 80, 81, "world.ddp1"));
  EXPECT_EQ(current_operation(one), nullptr);
  EXPECT_EQ(last_finished_operation(one)->channel, "world.ddp1");
}

TEST(CulpritRanks, RankThatDoesNotWait) {
  const RankSnapshot waits = rank(0, 1, {operation(1, "barrier", "", 70, 0)});
  EXPECT_EQ(culprit_ranks({waits, rank(1, 1, {}), waits}), std::vector<int>{1});
}

// As with DistributedDataParallel of torch, of whose wait only the operation is seen.
TEST(CulpritRanks, RankThatHasNotReachedTheOperationOfOthersThatAreNotSeenToWait) {
  RankSnapshot pending = rank(0, 1, {operation(1, "all_reduce", "", 70, 0)});
  pending.waiting = false;
  EXPECT_EQ(culprit_ranks({pending, pending, rank(2, 1, {})}), std::vector<int>{2});
}

TEST(CulpritRanks, RankThatWaitsElsewhere) {
  const RankSnapshot waits = rank(0, 1, {operation(1, "barrier", "", 60, 61), operation(2, "barrier", "", 70, 0)});
  EXPECT_EQ(culprit_ranks(
                {waits, rank(1, 1, {operation(1, "barrier", "", 60, 61), operation(1, "barrier", "", 70, 0, "pair")})}),
            std::vector<int>{1});
}

TEST(CulpritRanks, AllPresentRanksWhenNoneStandsOut) {
  const auto waits = [](int number) { return rank(number, 1, {operation(2, "barrier", "", 70, 0)}); };
  RankSnapshot left = rank(2, 1, {});
  left.has_left = true;
  EXPECT_EQ(culprit_ranks({waits(0), waits(1), left}), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace lockstep::job::health
