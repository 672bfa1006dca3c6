#include "lockstep/job/health/progress_report.h"

#include <gtest/gtest.h>

namespace lockstep::job {
namespace {

using base::FlightSeen;
using base::RankSeen;

constexpr std::int64_t kSecond = 1000000000;

/// Times in seconds; `ended` 0: it goes on.
FlightSeen operation(std::uint64_t seq, const std::string& kind, const std::string& name, std::int64_t begun,
                     std::int64_t ended, const std::string& channel = "world") {
  return {.number = seq,
          .seq = seq,
          .bytes = 4096,
          .begun = begun * kSecond,
          .ended = ended * kSecond,
          .channel = channel,
          .kind = kind,
          .dtype = "float32",
          .name = name};
}

RankSeen rank(int number, std::int64_t steps, std::vector<FlightSeen> operations) {
  const bool waiting = !operations.empty() && operations.back().goes_on();
  return {.rank = number,
          .world_size = 3,
          .steps = steps,
          .waiting = waiting,
          .looked_ns = 100 * kSecond,
          .operations = std::move(operations)};
}

TEST(Wavefront, DescribesAnOperation) {
  EXPECT_EQ(describe(operation(12, "all_reduce", "fc.weight", 1, 0)),
            "all_reduce(fc.weight)#12 of world, 4096 bytes of float32");
  FlightSeen barrier = operation(3, "barrier", "", 1, 0);
  barrier.bytes = 0;
  EXPECT_EQ(describe(barrier), "barrier#3 of world");
  FlightSeen gradients = operation(4, "gradients", "fc.weight..", 1, 0, "world.ddp0");
  gradients.dtype.clear();
  EXPECT_EQ(describe(gradients), "gradients(fc.weight..)#4 of world.ddp0, 4096 bytes");
}

TEST(Wavefront, WhoIsWhereAndWhoNeverCame) {
  const auto waiting = [](int number, std::int64_t since) {
    return rank(number, 31, {operation(56, "all_reduce", "", 70, 80), operation(57, "barrier", "", since, 0)});
  };
  const std::string text =
      wavefront({waiting(0, 90), rank(1, 30, {operation(56, "all_reduce", "", 70, 81)}), waiting(2, 88)});
  EXPECT_EQ(text,
            "  ranks 0,2, step 31: waits in barrier#57 of world, 4096 bytes of float32; last finished all_reduce#56 of "
            "world, 4096 bytes of float32; for 10.0 s to 12.0 s\n"
            "  rank 1, step 30: in user code; last finished all_reduce#56 of world, 4096 bytes of float32; for 19.0 s\n"
            "  rank 1 never came to barrier#57 of world, 4096 bytes of float32\n");
}

TEST(Wavefront, RanksInDifferentGroups) {
  const std::string text =
      wavefront({rank(0, 1, {operation(1, "all_reduce", "", 70, 80, "a"), operation(2, "all_reduce", "", 90, 0, "a")}),
                 rank(1, 1, {operation(1, "all_reduce", "", 70, 80, "a"), operation(1, "broadcast", "", 90, 0, "b")}),
                 rank(2, 1, {})});
  EXPECT_NE(text.find("rank 1 never came to all_reduce#2 of a"), std::string::npos) << text;
  EXPECT_EQ(text.find("never came to broadcast"), std::string::npos) << text;  // nobody else is known to be of b
  EXPECT_NE(text.find("rank 2, step 1: in user code; for 0.0 s"), std::string::npos) << text;
}

TEST(Wavefront, WhatBeganFirstIsWhatARankIsIn) {
  RankSeen one = rank(0, 0,
                      {operation(1, "all_gather", "", 70, 0), operation(1, "all_reduce", "", 71, 0, "b"),
                       operation(2, "barrier", "", 72, 73, "b")});
  one.waiting = true;
  EXPECT_EQ(wavefront({one}),
            "  rank 0, step 0: waits in all_gather#1 of world, 4096 bytes of float32; last finished barrier#2 of b, "
            "4096 bytes of float32; for 30.0 s\n");
}

TEST(Wavefront, WhoDoesNotWaitMayYetBeInAnOperation) {
  RankSeen one = rank(0, 7, {operation(1, "gradients", "fc", 70, 0)});
  one.waiting = false;
  EXPECT_EQ(wavefront({one}), "  rank 0, step 7: in gradients(fc)#1 of world, 4096 bytes of float32; for 30.0 s\n");
  one.busy_with = "evaluate";
  EXPECT_NE(wavefront({one}).find("4096 bytes of float32, busy with evaluate; for"), std::string::npos);
  one.operations.clear();
  EXPECT_NE(wavefront({one}).find("step 7: busy with evaluate;"), std::string::npos);
  one.left = true;
  EXPECT_NE(wavefront({one}).find("step 7: has left;"), std::string::npos);
}

TEST(Wavefront, WhoHasNotBegunIsMissedInWhatIsForAll) {
  const auto waits_in = [](const std::string& channel) {
    return rank(0, 0, {operation(1, "barrier", "", 70, 0, channel)});
  };
  for (const std::string channel : {"world", "world.ddp0"})
    EXPECT_NE(wavefront({waits_in(channel), rank(1, 0, {})}).find("rank 1 never came to barrier#1 of " + channel),
              std::string::npos);
  for (const std::string channel : {"world.0[1]", "world.0[1].ddp0"})
    EXPECT_EQ(wavefront({waits_in(channel), rank(1, 0, {})}).find("never came"), std::string::npos);
  RankSeen left = rank(1, 0, {});
  left.left = true;
  EXPECT_EQ(wavefront({waits_in("world"), left}).find("never came"), std::string::npos);
}

TEST(Wavefront, WhatWasGivenUpIsWhereARankIsUntilItBeginsAnother) {
  FlightSeen broken = operation(4, "gradients", "fc", 70, 0, "world.ddp0");
  broken.ended = base::FlightRing::kGivenUp;
  RankSeen one = rank(0, 7, {operation(3, "gradients", "fc", 60, 61, "world.ddp0"), broken});
  one.waiting = false;
  EXPECT_EQ(wavefront({one}),
            "  rank 0, step 7: gave up gradients(fc)#4 of world.ddp0, 4096 bytes of float32; last finished "
            "gradients(fc)#3 of world.ddp0, "
            "4096 bytes of float32; for 30.0 s\n");
  one.operations.push_back(operation(1, "gradients", "fc", 80, 81, "world.ddp1"));
  EXPECT_EQ(under_way(one), nullptr);
  EXPECT_EQ(last_finished(one)->channel, "world.ddp1");
}

TEST(ToBlame, WhoWaitsForNobody) {
  const RankSeen waits = rank(0, 1, {operation(1, "barrier", "", 70, 0)});
  EXPECT_EQ(to_blame({waits, rank(1, 1, {}), waits}), std::vector<int>{1});
}

TEST(ToBlame, WhoWaitsElsewhereAndWasAwaited) {
  const RankSeen waits = rank(0, 1, {operation(1, "barrier", "", 60, 61), operation(2, "barrier", "", 70, 0)});
  EXPECT_EQ(
      to_blame({waits, rank(1, 1, {operation(1, "barrier", "", 60, 61), operation(1, "barrier", "", 70, 0, "pair")})}),
      std::vector<int>{1});
}

TEST(ToBlame, AllWhenNobodyStandsOutAndNoneThatHasLeft) {
  const auto waits = [](int number) { return rank(number, 1, {operation(2, "barrier", "", 70, 0)}); };
  RankSeen left = rank(2, 1, {});
  left.left = true;
  EXPECT_EQ(to_blame({waits(0), waits(1), left}), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace lockstep::job
