#include "lockstep/base/telemetry/flight_ring.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

namespace lockstep::base::telemetry {
namespace {

struct FlightRingTest : ::testing::Test {
  // Zeroed, like memory from the system.
  std::unique_ptr<char[]> memory{new char[sizeof(FlightRing) + alignof(FlightRing)]()};
  FlightRing& ring = *reinterpret_cast<FlightRing*>(memory.get());
};

TEST_F(FlightRingTest, IsEmptyAtFirst) { EXPECT_TRUE(read_flight_ring(ring).empty()); }

TEST_F(FlightRingTest, RecordsBeginAndEnd) {
  const std::uint16_t world = ring.add_channel("world");
  const std::uint16_t other = ring.add_channel("world.0[1]");
  const auto first = ring.begin({.channel = world,
                                 .seq = 1,
                                 .kind = "all_reduce",
                                 .dtype = "float32",
                                 .name = "fc.weight",
                                 .bytes = 4096,
                                 .step = 7});
  ring.begin({.channel = other, .seq = 9, .kind = "reduce_scatter", .dtype = "bfloat16"});
  ring.end(first);
  const auto seen = read_flight_ring(ring);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].channel, "world");
  EXPECT_EQ(seen[0].seq, 1u);
  EXPECT_EQ(seen[0].kind, "all_reduce");
  EXPECT_EQ(seen[0].dtype, "float32");
  EXPECT_EQ(seen[0].name, "fc.weight");
  EXPECT_EQ(seen[0].bytes, 4096u);
  EXPECT_EQ(seen[0].step, 7);
  EXPECT_FALSE(seen[0].is_running());
  EXPECT_GE(seen[0].ended, seen[0].started);
  EXPECT_EQ(seen[1].channel, "world.0[1]");
  EXPECT_EQ(seen[1].kind, "reduce_scatter");  // fills its field
  EXPECT_EQ(seen[1].dtype, "bfloat16");
  EXPECT_TRUE(seen[1].is_running());
  EXPECT_EQ(ring.started, 2u);
}

TEST_F(FlightRingTest, AbandonedIsNeitherRunningNorFinished) {
  const std::uint16_t world = ring.add_channel("world"), other = ring.add_channel("other");
  ring.end(ring.begin({.channel = world, .seq = 1}));
  const auto broken = ring.begin({.channel = world, .seq = 2});
  ring.begin({.channel = other, .seq = 1});
  ring.abandon(world);
  ring.begin({.channel = world, .seq = 3});
  const auto seen = read_flight_ring(ring);
  ASSERT_EQ(seen.size(), 4u);
  EXPECT_TRUE(seen[0].is_finished());
  EXPECT_TRUE(seen[1].is_abandoned());
  EXPECT_FALSE(seen[1].is_running() || seen[1].is_finished());
  EXPECT_TRUE(seen[2].is_running());
  EXPECT_TRUE(seen[3].is_running());
  ring.end(broken);  // as a thread does that is still in the operation when the channel is abandoned
  EXPECT_TRUE(read_flight_ring(ring)[1].is_finished());
}

TEST_F(FlightRingTest, KeepsTheNewestEntries) {
  const auto early = ring.begin({.seq = 1});
  for (std::uint64_t i = 2; i <= FlightRing::kEntries + 10; ++i) ring.end(ring.begin({.seq = i}));
  ring.end(early);  // its entry has been overwritten
  const auto seen = read_flight_ring(ring);
  ASSERT_EQ(seen.size(), FlightRing::kEntries);
  EXPECT_EQ(seen.front().seq, 11u);
  EXPECT_EQ(seen.back().seq, FlightRing::kEntries + 10);
}

TEST_F(FlightRingTest, TextIsTruncatedAndPrintable) {
  for (int i = 0; i < 300; ++i) ring.add_channel("c" + std::to_string(i));
  ring.begin({.channel = 299, .kind = "\x1b[31mabcdefghijklmnopqrst", .name = std::string(200, 'n')});
  const auto seen = read_flight_ring(ring);
  EXPECT_EQ(seen.at(0).kind, "?[31mabcdefghi");
  EXPECT_EQ(seen.at(0).name, std::string(sizeof FlightText::name, 'n'));
  EXPECT_EQ(seen.at(0).channel, "(one of many)");  // the table of channels is full
}

TEST_F(FlightRingTest, ManyThreadsCanWrite) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i)
        ring.end(ring.begin({.seq = static_cast<std::uint64_t>(t), .name = std::string(t + 1, 'x')}));
    });
  for (std::thread& thread : threads) thread.join();
  const auto seen = read_flight_ring(ring);
  ASSERT_EQ(seen.size(), 2000u);
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].number, i + 1);
    EXPECT_EQ(seen[i].name.size(), seen[i].seq + 1);
    EXPECT_FALSE(seen[i].is_running());
  }
}

/// What the k-th operation of this test records: all fields are functions of `seq`.
OperationStart operation(std::uint64_t seq, const std::string& name, std::uint16_t channel) {
  return {.channel = channel,
          .seq = seq,
          .kind = "all_reduce",
          .name = name,
          .bytes = seq * 3,
          .step = static_cast<std::int64_t>(seq * 5)};
}

TEST_F(FlightRingTest, ReaderSeesNoMixedEntry) {
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    std::uint16_t channel = 0;
    for (std::uint64_t seq = 1; !stop; ++seq) {
      if (seq % 5 == 1 && seq < 1000) channel = ring.add_channel("channel");
      ring.end(ring.begin(operation(seq, "parameter." + std::to_string(seq), channel)));
      // Uses the first entries again, so that they change while they are read.
      if (seq % 8 == 0) ring.started.store(seq / 8 * FlightRing::kEntries);
    }
  });
  std::size_t num_seen = 0;
  for (int i = 0; i < 200 || num_seen == 0; ++i)
    for (const OperationRecord& record : read_flight_ring(ring)) {
      ++num_seen;
      ASSERT_EQ(record.name, "parameter." + std::to_string(record.seq));
      ASSERT_EQ(record.channel, "channel");
      ASSERT_EQ(record.bytes, record.seq * 3);
      ASSERT_EQ(record.step, static_cast<std::int64_t>(record.seq * 5));
    }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace lockstep::base::telemetry
