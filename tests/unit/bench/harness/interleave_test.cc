#include "bench/harness/interleave.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::bench {
namespace {

using ::testing::ElementsAre;

TEST(Interleaving, RotatesTheOrderAndKeepsResultsInPlace) {
  std::string order;
  std::vector<MeasureFunction> measurements;
  for (const char name : {'a', 'b', 'c'})
    measurements.push_back([&order, name] {
      order += name;
      return std::vector<double>{static_cast<double>(name), 1};
    });
  const auto results = run_interleaved(measurements, {.rounds = 3});
  EXPECT_EQ(order, "abcbcacab");
  ASSERT_EQ(results.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(results[i].size(), 3u);
    EXPECT_THAT(results[i][2], ElementsAre('a' + static_cast<double>(i), 1));
  }
}

TEST(Interleaving, AddsRoundsWhenNoisy) {
  for (const bool calms_down : {false, true}) {
    int rounds = 0;
    const auto results = run_interleaved({[&] {
                                           ++rounds;
                                           return std::vector<double>{calms_down && rounds > 2 ? 1.0 : 1.0 + rounds};
                                         }},
                                         {.rounds = 5});
    // 2, 3, 1, 1, 1: quartiles 1 and 2; with a sixth round 1 and 1.75, and so on until those two are outliers.
    EXPECT_EQ(rounds, calms_down ? 9 : 10);
    EXPECT_EQ(is_noisy(results, 0.15), !calms_down);
  }
}

TEST(Interleaving, AddsNoRoundsWhenQuiet) {
  int rounds = 0;
  run_interleaved({[&] { return std::vector<double>{1.0 + 0.01 * (rounds++ % 2)}; }}, {.rounds = 6});
  EXPECT_EQ(rounds, 6);
}

}  // namespace
}  // namespace lockstep::bench
