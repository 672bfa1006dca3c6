// Values over the steps of a run of any length, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::training::inline report {

/// One or more adjacent values, merged.
struct CurvePoint {
  double first_step = 0;
  double last_step = 0;
  double min = 0;  ///< of the finite values, as are max and sum
  double max = 0;
  double sum = 0;
  std::int64_t num_finite = 0;
  std::int64_t num_non_finite = 0;  ///< NaN and infinities

  double step() const { return (first_step + last_step) / 2; }
  double mean() const { return num_finite > 0 ? sum / static_cast<double>(num_finite) : 0; }
  bool operator==(const CurvePoint&) const = default;
};

/// At most max_points points, each of the same number of values (the last one may have fewer). When the curve is full,
/// adjacent points are merged in pairs; each point keeps its minimum and maximum, so a spike of one step stays visible
/// in a run of any length.
class Curve {
 public:
  /// `max_points` must be at least 2 and is rounded up to an even number.
  Curve() : Curve(400) {}
  explicit Curve(std::size_t max_points) : max_points_((max_points + 1) / 2 * 2) {}
  /// A curve of points that were recorded elsewhere.
  static Curve from_points(std::vector<CurvePoint> points);

  void add(double step, double value);
  const std::vector<CurvePoint>& points() const { return points_; }

 private:
  std::size_t max_points_;
  std::int64_t values_per_point_ = 1;
  std::vector<CurvePoint> points_;
};

}  // namespace lockstep::training::inline report
