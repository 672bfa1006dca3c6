#include "lockstep/train/report/curve.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lockstep::train {
namespace {

CurvePoint joined(const CurvePoint& a, const CurvePoint& b) {
  CurvePoint both = a.num_finite > 0 ? a : b;
  both.first_step = a.first_step;
  both.last_step = b.last_step;
  both.num_others = a.num_others + b.num_others;
  if (a.num_finite == 0 || b.num_finite == 0) return both;
  both.min = std::min(a.min, b.min);
  both.max = std::max(a.max, b.max);
  both.sum = a.sum + b.sum;
  both.num_finite = a.num_finite + b.num_finite;
  return both;
}

}  // namespace

Curve Curve::of(std::vector<CurvePoint> points) {
  Curve curve(std::max<std::size_t>(2, points.size()));
  curve.points_ = std::move(points);
  return curve;
}

void Curve::add(double step, double value) {
  const CurvePoint one =
      std::isfinite(value) ? CurvePoint{step, step, value, value, value, 1, 0} : CurvePoint{step, step, 0, 0, 0, 0, 1};
  if (!points_.empty() && points_.back().num_finite + points_.back().num_others < per_point_) {
    points_.back() = joined(points_.back(), one);
    return;
  }
  if (points_.size() == max_points_) {
    for (std::size_t i = 0; i < max_points_ / 2; ++i) points_[i] = joined(points_[2 * i], points_[2 * i + 1]);
    points_.resize(max_points_ / 2);
    per_point_ *= 2;
  }
  points_.push_back(one);
}

}  // namespace lockstep::train
