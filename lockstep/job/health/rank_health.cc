#include "lockstep/job/health/rank_health.h"

#include <algorithm>

namespace lockstep::job::health {

std::optional<HangFinding> find_hang(const std::vector<RankHealth>& health, int world_size,
                                     const HealthLimits& limits) {
  constexpr std::chrono::milliseconds kDisabled{0};
  HangFinding stalled{base::Cause::kRankStalled, {}};
  HangFinding stuck{base::Cause::kRankStuck, {}};
  bool any_progress = false;
  for (const RankHealth& one : health) {
    if (limits.stall != kDisabled && one.since_heartbeat >= limits.stall) stalled.ranks.push_back(one.rank);
    if (!one.is_in_world) continue;
    if (one.since_progress < limits.hang) any_progress = true;
    stuck.ranks.push_back(one.rank);
  }
  if (!stalled.ranks.empty()) return stalled;
  if (limits.hang == kDisabled || any_progress || stuck.ranks.empty()) return std::nullopt;
  if ((world_size == 1 || stuck.ranks.size() == 1) && !limits.judge_last_rank) return std::nullopt;
  return stuck;
}

}  // namespace lockstep::job::health
