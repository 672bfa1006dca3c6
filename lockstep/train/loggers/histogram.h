// How many of many numbers lie where.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::train {

/// Of the finite ones among them; the others are only counted. Bucket i holds what is above limits[i - 1] (the first
/// one: from `min`) and at most limits[i], as in TensorBoard's HistogramProto.
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
      limits;  ///< growing; one when all are equal, none when none is finite, else kBuckets of one width
  std::vector<std::int64_t> counts;  ///< as many
};

/// Two passes. Pure.
Histogram make_histogram(std::span<const float> values);
Histogram make_histogram(std::span<const double> values);

}  // namespace lockstep::train
