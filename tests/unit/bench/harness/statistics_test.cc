#include "bench/harness/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::bench {
namespace {

using tests::message_of;

TEST(Statistics, MedianAndSpread) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(spread({1, 1, 1, 9}), 2.0);  // quartiles 1 and 3
  EXPECT_EQ(spread({10, 20, 30, 40, 50}), 20.0 / 30);
  EXPECT_EQ(spread({1, 2, 3}), 0);
}

TEST(Statistics, SummarizesRunsAndSpreadOfRounds) {
  const TimingSummary summary = summarize({{1, 2, 3}, {2, 2, 9}, {2, 2, 2}, {4, 4, 4}});
  EXPECT_EQ(summary.median_s, 2);
  EXPECT_EQ(summary.min_s, 1);
  EXPECT_EQ(summary.runs, 12);
  EXPECT_EQ(summary.spread, spread({2, 2, 2, 4}));
}

TEST(Statistics, RatioIsTakenPerRound) {
  // The machine is ten times slower in two of three rounds: the ratio of the medians of all runs would be 20 / 10.
  EXPECT_EQ(ratio({{3}, {20}, {60}}, {{1}, {10}, {20}}), 3);
}

TEST(Statistics, SizesRoundTrip) {
  for (const auto& [text, bytes] : {std::pair{"8", 8UL}, {"4K", 4096UL}, {"250M", 250UL << 20}, {"1G", 1UL << 30}}) {
    EXPECT_EQ(parse_size(text), bytes);
    EXPECT_EQ(size_text(bytes), text);
  }
  EXPECT_EQ(size_text(4100), "4100");
  for (const char* bad : {"", "0", "6", "-4", "2G", "4k", "K", "1.5M", "99999999999999999999", "4K "})
    EXPECT_THAT(message_of<base::UsageError>([&] { parse_size(bad); }),
                ::testing::HasSubstr("expected a multiple of 4 bytes"))
        << bad;
}

TEST(Statistics, FormatsTimesWithUnits) {
  EXPECT_EQ(time_text(1.234e-6), "1.23 us");
  EXPECT_EQ(time_text(0.0241), "24.1 ms");
  EXPECT_EQ(time_text(0.217), "217 ms");
  EXPECT_EQ(time_text(2.5), "2.50 s");
}

}  // namespace
}  // namespace lockstep::bench
