#include <gtest/gtest.h>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher::doctor {
namespace {

TEST(NetworkCost, RingAllReduceSeconds) {
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(2, 1000, 100), 10);
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(4, 1000, 100), 15);
  EXPECT_DOUBLE_EQ(ring_all_reduce_seconds(1, 1000, 100), 0);
}

TEST(NetworkCost, Classes) {
  EXPECT_EQ(network_class(117e6), "a gigabit network");
  EXPECT_EQ(network_class(11e6), "a network slower than a gigabit");
  EXPECT_EQ(network_class(1.17e9), "a 10 Gb/s network");
  EXPECT_EQ(network_class(2.9e9), "a 25 Gb/s network");
  EXPECT_EQ(network_class(11.5e9), "a 100 Gb/s network");
  EXPECT_EQ(network_class(40e9), "a network faster than 100 Gb/s");
  EXPECT_TRUE(is_slow(125e6));
  EXPECT_FALSE(is_slow(1.1e9));
}

TEST(NetworkCost, Texts) {
  EXPECT_EQ(speed_text(117.5e6), "0.94 Gb/s");
  EXPECT_EQ(time_text(2.14), "2.1 s");
  EXPECT_EQ(time_text(31), "31 s");
  EXPECT_EQ(time_text(0.62), "620 ms");
  EXPECT_EQ(time_text(0.0012), "1.2 ms");
  EXPECT_EQ(time_text(0.9999), "1 s");
  EXPECT_EQ(time_text(4.1e-5), "0.041 ms");
  EXPECT_EQ(cost_text(2, 1'000'000'000, 125e6, 0),
            "this is a gigabit network: 8 s per step for 1e+03 MB of gradients; 800 ms at 10 Gb/s, 1 s when hosts "
            "exchange every 8 steps");
}

}  // namespace
}  // namespace lockstep::launcher::doctor
