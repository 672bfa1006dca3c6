#include "lockstep/job/health/rank_health.h"

#include <algorithm>

namespace lockstep::job::health {

std::optional<HangFinding> find_hang(const std::vector<RankHealth>& health, int world_size,
                                     const HealthLimits& limits) {
  const auto exceeds = [](std::chrono::milliseconds time, std::chrono::milliseconds limit) {
    return limit.count() != 0 && time >= limit;
  };
  HangFinding stalled{HangKind::kStall, {}}, stuck{HangKind::kHang, {}}, working{HangKind::kWork, {}},
      idle{HangKind::kIdle, {}};
  const bool any_in_world = std::ranges::count(health, RankPhase::kInWorld, &RankHealth::phase) > 0;
  const bool any_waits = std::ranges::any_of(
      health, [](const RankHealth& rank) { return rank.phase == RankPhase::kInWorld && rank.is_waiting; });
  bool any_progress = false, any_activity = false;
  for (const RankHealth& rank : health) {
    if (exceeds(rank.since_heartbeat, limits.stall)) stalled.ranks.push_back(rank.rank);
    idle.ranks.push_back(rank.rank);
    any_activity |= !exceeds(rank.since_activity, limits.idle);
    const bool is_judged = rank.phase == RankPhase::kInWorld || (rank.phase == RankPhase::kBeforeWorld && any_waits) ||
                           (rank.phase == RankPhase::kAfterWorld && !any_in_world);
    if (!is_judged) continue;
    any_progress |= !exceeds(rank.since_progress, limits.hang);
    stuck.ranks.push_back(rank.rank);
    if (!rank.is_waiting && exceeds(rank.since_report, limits.work)) working.ranks.push_back(rank.rank);
  }
  if (!stalled.ranks.empty()) return stalled;
  const bool is_last = world_size == 1 || (any_in_world && stuck.ranks.size() == 1);
  if ((any_waits || (!any_in_world && !is_last) || (is_last && limits.judge_last_work)) && !working.ranks.empty())
    return working;
  if (!any_progress && !stuck.ranks.empty() && (!is_last || limits.judge_last_rank)) return stuck;
  if (!any_activity && !idle.ranks.empty()) return idle;
  return std::nullopt;
}

}  // namespace lockstep::job::health
