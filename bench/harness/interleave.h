// Interleaved measurement of several operations.
#pragma once

#include <functional>
#include <vector>

#include "bench/harness/statistics.h"

namespace lockstep::bench {

/// Options of run_interleaved().
struct ComparisonOptions {
  int rounds = 7;
  /// A result is noisy when the spread of the medians of its rounds is above this. Noisy results cause more rounds, up
  /// to twice as many.
  double max_spread = 0.15;
};

/// Measures one implementation and returns the seconds of one or more samples.
using MeasureFunction = std::function<std::vector<double>()>;

/// Calls all `measurements` in each round, in an order that rotates, so that a temporary slowdown of the machine
/// affects all of them and none always follows the same other. Returns their samples, in the order of `measurements`.
std::vector<Rounds> run_interleaved(const std::vector<MeasureFunction>& measurements, const ComparisonOptions& options);

/// Returns whether the spread of one of the results is above `max_spread`. Pure.
bool is_noisy(const std::vector<Rounds>& results, double max_spread);

}  // namespace lockstep::bench
