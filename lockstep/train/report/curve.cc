#include "lockstep/train/report/curve.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lockstep::training::inline report {
namespace {

CurvePoint merge_points(const CurvePoint& a, const CurvePoint& b) {
  CurvePoint both = a.num_finite > 0 ? a : b;
  both.first_step = a.first_step;
  both.last_step = b.last_step;
  both.num_non_finite = a.num_non_finite + b.num_non_finite;
  if (a.num_finite == 0 || b.num_finite == 0) return both;
  both.min = std::min(a.min, b.min);
  both.max = std::max(a.max, b.max);
  both.sum = a.sum + b.sum;
  both.num_finite = a.num_finite + b.num_finite;
  return both;
}

}  // namespace

Curve Curve::from_points(std::vector<CurvePoint> points) {
  Curve curve(std::max<std::size_t>(2, points.size()));
  curve.points_ = std::move(points);
  return curve;
}

void Curve::add(double step, double value) {
  const CurvePoint point =
      std::isfinite(value) ? CurvePoint{step, step, value, value, value, 1, 0} : CurvePoint{step, step, 0, 0, 0, 0, 1};
  if (!points_.empty() && points_.back().num_finite + points_.back().num_non_finite < values_per_point_) {
    points_.back() = merge_points(points_.back(), point);
    return;
  }
  if (points_.size() == max_points_) {
    for (std::size_t i = 0; i < max_points_ / 2; ++i) points_[i] = merge_points(points_[2 * i], points_[2 * i + 1]);
    points_.resize(max_points_ / 2);
    values_per_point_ *= 2;
  }
  points_.push_back(point);
}

}  // namespace lockstep::training::inline report
