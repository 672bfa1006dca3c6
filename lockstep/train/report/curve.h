// Numbers over the steps of a run, however long it is, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::train {

/// Some neighbouring numbers as one.
struct CurvePoint {
  double first_step = 0;
  double last_step = 0;
  double min = 0;  ///< of the finite ones
  double max = 0;
  double sum = 0;
  std::int64_t num_finite = 0;
  std::int64_t num_non_finite = 0;  ///< NaN and infinities

  double step() const { return (first_step + last_step) / 2; }
  double mean() const { return num_finite > 0 ? sum / static_cast<double>(num_finite) : 0; }
  bool operator==(const CurvePoint&) const = default;
};

/// At most max_points of them, each of equally many numbers (the last one: of fewer). When there are more, each two
/// become one; the least and the most of each stay known, so a spike of one step shows however long the run is. Pure
/// but for what it remembers.
class Curve {
 public:
  /// `max_points` >= 2, rounded up to an even number.
  Curve() : Curve(400) {}
  explicit Curve(std::size_t max_points) : max_points_((max_points + 1) / 2 * 2) {}
  /// One that was recorded elsewhere.
  static Curve from_points(std::vector<CurvePoint> points);

  void add(double step, double value);
  const std::vector<CurvePoint>& points() const { return points_; }

 private:
  std::size_t max_points_;
  std::int64_t values_per_point_ = 1;
  std::vector<CurvePoint> points_;
};

}  // namespace lockstep::train
