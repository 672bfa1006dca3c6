#include "bench/harness/interleave.h"

#include <algorithm>

namespace lockstep::bench {

bool is_noisy(const std::vector<Rounds>& results, double max_spread) {
  return std::any_of(results.begin(), results.end(),
                     [&](const Rounds& rounds) { return summarize(rounds).spread > max_spread; });
}

std::vector<Rounds> run_interleaved(const std::vector<MeasureFunction>& measurements,
                                    const ComparisonOptions& options) {
  std::vector<Rounds> results(measurements.size());
  for (int round = 0; round < 2 * options.rounds; ++round) {
    if (round >= options.rounds && !is_noisy(results, options.max_spread)) break;
    for (std::size_t i = 0; i < measurements.size(); ++i) {
      const std::size_t at = (i + static_cast<std::size_t>(round)) % measurements.size();
      results[at].push_back(measurements[at]());
    }
  }
  return results;
}

}  // namespace lockstep::bench
