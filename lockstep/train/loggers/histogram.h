// Histograms of values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::training::inline loggers {

/// A histogram of the finite values; NaN and infinities are only counted. Bucket i counts values above limits[i - 1]
/// (the first bucket: from `min`) and at most limits[i], as in TensorBoard's HistogramProto.
struct Histogram {
  static constexpr int kBuckets = 64;

  double min = 0;
  double max = 0;
  double sum = 0;
  double sum_squares = 0;
  std::int64_t num_finite = 0;
  std::int64_t num_nan = 0;
  std::int64_t num_infinite = 0;
  std::vector<double>
      limits;  ///< increasing: kBuckets of equal width; one if all are equal; none if no value is finite
  std::vector<std::int64_t> counts;  ///< same size as limits
};

/// Reads the values twice. Pure.
Histogram make_histogram(std::span<const float> values);
Histogram make_histogram(std::span<const double> values);

}  // namespace lockstep::training::inline loggers
