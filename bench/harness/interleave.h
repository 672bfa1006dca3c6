// Implementations that take turns.
#pragma once

#include <functional>
#include <vector>

#include "bench/harness/statistics.h"

namespace lockstep::bench {

struct ComparisonOptions {
  int rounds = 7;
  /// A result whose rounds' medians spread wider than this is noisy: then there are more rounds, up to twice as many,
  /// and what is noisy even then is marked so.
  double max_spread = 0.15;
};

/// One turn of an implementation: the seconds that it took, once or several times.
using MeasureFunction = std::function<std::vector<double>()>;

/// Round after round each has its turn, in an order that rotates: what slows the machine down for a second slows all of
/// them, and nobody always follows the same neighbour. Returns the seconds, in the order of `turns`.
std::vector<Rounds> race(const std::vector<MeasureFunction>& measurements, const ComparisonOptions& options);

/// True when one of the results spreads wider than allowed.
bool noisy(const std::vector<Rounds>& results, double max_spread);

}  // namespace lockstep::bench
