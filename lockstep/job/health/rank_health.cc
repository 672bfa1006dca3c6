#include "lockstep/job/health/rank_health.h"

#include <algorithm>

namespace lockstep::job {

std::optional<HangFinding> find_hang(const std::vector<RankHealth>& health, int world_size,
                                     const HealthLimits& limits) {
  constexpr std::chrono::milliseconds kForEver{0};
  HangFinding silent{base::Cause::kRankStalled, {}};
  HangFinding idle{base::Cause::kRankStuck, {}};
  bool any_progress = false;
  for (const RankHealth& one : health) {
    if (limits.stall != kForEver && one.since_heartbeat >= limits.stall) silent.ranks.push_back(one.rank);
    if (!one.is_in_world) continue;
    if (one.since_progress < limits.hang) any_progress = true;
    idle.ranks.push_back(one.rank);
  }
  if (!silent.ranks.empty()) return silent;
  if (limits.hang == kForEver || any_progress || idle.ranks.empty()) return std::nullopt;
  if ((world_size == 1 || idle.ranks.size() == 1) && !limits.judge_last_rank) return std::nullopt;
  return idle;
}

}  // namespace lockstep::job
