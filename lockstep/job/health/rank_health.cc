#include "lockstep/job/health/rank_health.h"

#include <algorithm>

namespace lockstep::job {

std::optional<Finding> find_stuck(const std::vector<Pulse>& pulses, int world_size, const PulseLimits& limits) {
  constexpr std::chrono::milliseconds kForEver{0};
  Finding silent{base::Cause::kRankStalled, {}};
  Finding idle{base::Cause::kRankStuck, {}};
  bool any_gets_on = false;
  for (const Pulse& pulse : pulses) {
    if (limits.stall != kForEver && pulse.silent >= limits.stall) silent.ranks.push_back(pulse.rank);
    if (!pulse.in_world) continue;
    if (pulse.idle < limits.hang) any_gets_on = true;
    idle.ranks.push_back(pulse.rank);
  }
  if (!silent.ranks.empty()) return silent;
  if (limits.hang == kForEver || any_gets_on || idle.ranks.empty()) return std::nullopt;
  if ((world_size == 1 || idle.ranks.size() == 1) && !limits.also_alone) return std::nullopt;
  return idle;
}

}  // namespace lockstep::job
