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
  const auto is_in = [](RankPhase phase) { return [phase](const RankHealth& one) { return one.phase == phase; }; };
  const bool any_in_world = std::any_of(health.begin(), health.end(), is_in(RankPhase::kInWorld));
  const bool any_waits = std::any_of(health.begin(), health.end(), [](const RankHealth& one) {
    return one.phase == RankPhase::kInWorld && one.is_waiting;
  });
  bool any_progress = false, any_activity = false;
  for (const RankHealth& one : health) {
    if (exceeds(one.since_heartbeat, limits.stall)) stalled.ranks.push_back(one.rank);
    idle.ranks.push_back(one.rank);
    any_activity |= !exceeds(one.since_activity, limits.idle);
    const bool is_judged = one.phase == RankPhase::kInWorld || (one.phase == RankPhase::kBeforeWorld && any_waits) ||
                           (one.phase == RankPhase::kAfterWorld && !any_in_world);
    if (!is_judged) continue;
    any_progress |= !exceeds(one.since_progress, limits.hang);
    stuck.ranks.push_back(one.rank);
    if (!one.is_waiting && exceeds(one.since_report, limits.work)) working.ranks.push_back(one.rank);
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
