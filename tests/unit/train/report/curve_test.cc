#include "lockstep/train/report/curve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "lockstep/train/report/curve_logger.h"

namespace lockstep::training {
namespace {

TEST(Curve, KeepsFewValuesExactly) {
  Curve curve(4);
  for (int i = 0; i < 4; ++i) curve.add(i, 10 * i);
  ASSERT_EQ(curve.points().size(), 4U);
  EXPECT_EQ(curve.points()[3], (CurvePoint{3, 3, 30, 30, 30, 1, 0}));
}

TEST(Curve, MergesAdjacentValues) {
  Curve curve(4);
  for (int i = 0; i < 5; ++i) curve.add(i, 10 * i);
  ASSERT_EQ(curve.points().size(), 3U);
  EXPECT_EQ(curve.points()[0], (CurvePoint{0, 1, 0, 10, 10, 2, 0}));
  EXPECT_EQ(curve.points()[2], (CurvePoint{4, 4, 40, 40, 40, 1, 0}));
}

TEST(Curve, KeepsExtremesOfAMillionValues) {
  Curve curve;
  for (int i = 0; i < 1'000'000; ++i) curve.add(i, i == 777'777 ? 1e9 : i == 5 ? NAN : i == 6 ? -HUGE_VAL : 1);
  std::int64_t finite = 0, others = 0;
  double max = 0, sum = 0;
  for (const CurvePoint& point : curve.points()) {
    finite += point.num_finite;
    others += point.num_non_finite;
    max = std::max(max, point.max);
    sum += point.sum;
    EXPECT_EQ(point.min, 1);
  }
  EXPECT_LE(curve.points().size(), 400U);
  EXPECT_GE(curve.points().size(), 200U);
  EXPECT_EQ(finite, 999'998);
  EXPECT_EQ(others, 2);
  EXPECT_EQ(max, 1e9);
  EXPECT_EQ(sum, 999'997 + 1e9);
  EXPECT_EQ(curve.points().back().last_step, 999'999);
}

TEST(Curve, KeepsPointsOfNaNsOnly) {
  Curve curve(2);
  for (int i = 0; i < 8; ++i) curve.add(i, NAN);
  EXPECT_EQ(curve.points()[0], (CurvePoint{0, 3, 0, 0, 0, 0, 4}));
}

TEST(CurveLogger, KeepsACurvePerName) {
  CurveLogger logger;
  for (int step = 0; step < 3; ++step) logger.log_scalars({step, 0}, {{"b", step}, {"a", -step}});
  ASSERT_EQ(logger.curves().size(), 2U);
  EXPECT_EQ(logger.curves()[0].first, "b");
  EXPECT_EQ(logger.curves()[1].second.points()[2].min, -2);
}

TEST(CurveLogger, IsBounded) {
  CurveLogger logger;
  for (int i = 0; i < 150; ++i) logger.log_scalars({i, 0}, {{"name " + std::to_string(i % 130), i}});
  EXPECT_EQ(logger.curves().size(), CurveLogger::kMaxNames);
  EXPECT_EQ(logger.num_dropped_names(), 30U);
  EXPECT_EQ(logger.curves()[0].second.points().size(), 2U);
}

}  // namespace
}  // namespace lockstep::training
