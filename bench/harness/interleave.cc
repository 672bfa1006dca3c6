#include "bench/harness/interleave.h"

#include <algorithm>

namespace lockstep::bench {

bool noisy(const std::vector<Rounds>& results, double max_spread) {
  return std::any_of(results.begin(), results.end(),
                     [&](const Rounds& rounds) { return summarize(rounds).spread > max_spread; });
}

std::vector<Rounds> race(const std::vector<TakeTurn>& turns, const RaceOptions& options) {
  std::vector<Rounds> results(turns.size());
  for (int round = 0; round < 2 * options.rounds; ++round) {
    if (round >= options.rounds && !noisy(results, options.max_spread)) break;
    for (std::size_t i = 0; i < turns.size(); ++i) {
      const std::size_t at = (i + static_cast<std::size_t>(round)) % turns.size();
      results[at].push_back(turns[at]());
    }
  }
  return results;
}

}  // namespace lockstep::bench
