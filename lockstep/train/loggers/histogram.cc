#include "lockstep/train/loggers/histogram.h"

#include <algorithm>
#include <cmath>

namespace lockstep::training::inline loggers {
namespace {

template <typename Number>
Histogram compute_histogram(std::span<const Number> values) {
  Histogram histogram;
  for (const Number number : values) {
    const auto value = static_cast<double>(number);
    if (!std::isfinite(value)) {
      ++(std::isnan(value) ? histogram.num_nan : histogram.num_infinite);
      continue;
    }
    const bool first = histogram.num_finite++ == 0;
    histogram.min = first ? value : std::min(histogram.min, value);
    histogram.max = first ? value : std::max(histogram.max, value);
    histogram.sum += value;
    histogram.sum_squares += value * value;
  }
  if (histogram.num_finite == 0) return histogram;
  if (histogram.min == histogram.max) {
    histogram.limits = {histogram.max};
    histogram.counts = {histogram.num_finite};
    return histogram;
  }
  // Halves first, because max - min may overflow.
  const double half_width = histogram.max / 2 - histogram.min / 2;
  const double scale = Histogram::kBuckets / half_width;
  histogram.counts.assign(Histogram::kBuckets, 0);
  for (const Number number : values) {
    const auto value = static_cast<double>(number);
    if (!std::isfinite(value)) continue;
    const double position = (value / 2 - histogram.min / 2) * scale;
    ++histogram.counts[static_cast<std::size_t>(std::clamp(std::ceil(position) - 1, 0.0, Histogram::kBuckets - 1.0))];
  }
  for (int i = 1; i <= Histogram::kBuckets; ++i)
    histogram.limits.push_back(i == Histogram::kBuckets ? histogram.max
                                                        : histogram.min + half_width / Histogram::kBuckets * i * 2);
  return histogram;
}

}  // namespace

Histogram make_histogram(std::span<const float> values) { return compute_histogram(values); }
Histogram make_histogram(std::span<const double> values) { return compute_histogram(values); }

}  // namespace lockstep::training::inline loggers
