// What many timings say. Pure.
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// Of a list that is not empty: the middle, or the mean of the two in the middle.
double median(std::vector<double> values);
/// (upper quartile - lower quartile) / median: how far apart the values of a quiet machine would not be. 0 for fewer
/// than four.
double spread(std::vector<double> values);

/// The seconds of one implementation, those of a round together.
using Rounds = std::vector<std::vector<double>>;

struct TimingSummary {
  double median_s = 0;
  double min_s = 0;
  int runs = 0;
  double spread = 0;  ///< of the rounds' medians
};
TimingSummary summarize(const Rounds& rounds);

/// The median over the rounds of (median of `own` / median of `base`) of the same round: what slowed the machine in a
/// round slowed both.
double ratio(const Rounds& own, const Rounds& base);

/// "4K", "1M", "250M", "8": bytes, K and M being 1024 and 1024^2. Throws UsageError; allowed are multiples of 4 from 4
/// to 1G.
std::size_t parse_size(const std::string& text);
std::string size_text(std::size_t bytes);
/// Seconds with a unit that leaves one to four digits in front of the point: "1.23 us", "24.1 ms".
std::string time_text(double seconds);

}  // namespace lockstep::bench
