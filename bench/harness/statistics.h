// Statistics of timings. All functions are pure.
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// Returns the median of a list that is not empty: the middle value, or the mean of the two middle values.
double median(std::vector<double> values);
/// Returns (upper quartile - lower quartile) / median, a measure of noise; 0 for fewer than four values.
double spread(std::vector<double> values);

/// The samples of one implementation in seconds, by round.
using Rounds = std::vector<std::vector<double>>;

struct TimingSummary {
  double median_s = 0;
  double min_s = 0;
  int runs = 0;
  double spread = 0;  ///< spread of the medians of the rounds
};
TimingSummary summarize(const Rounds& rounds);

/// Returns the median over the rounds of (median of `own` / median of `base`) in the same round. This cancels slowdowns
/// of the machine that affect both.
double ratio(const Rounds& own, const Rounds& base);

/// Parses a size in bytes, such as "8", "4K", "1M" or "250M"; K, M and G are powers of 1024. Throws UsageError unless
/// it is a multiple of 4 from 4 to 1G.
std::size_t parse_size(const std::string& text);
std::string size_text(std::size_t bytes);
/// Formats seconds with a unit and three significant digits: "1.23 us", "24.1 ms".
std::string time_text(double seconds);

}  // namespace lockstep::bench
