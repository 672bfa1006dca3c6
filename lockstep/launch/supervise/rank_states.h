// What agents have reported about running ranks.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"

namespace lockstep::launcher {

/// Collects health reports and snapshots of all ranks. Used by one thread.
class RankStates {
 public:
  RankStates(int world_size, const job::HealthLimits& limits) : world_size_(world_size), limits_(limits) {}

  /// Returns true if this report is the first of a silence that deserves a warning.
  bool add(const job::RankHealth& health);
  void add(base::RankSnapshot snapshot);
  /// The process of `rank` has exited.
  void on_rank_exit(int rank);

  /// Judges the last health reports. A rank that leaves its world counts as progress: it has just released the other
  /// ranks, whose last reports may be older.
  std::optional<job::HangFinding> find_hang() const;

  const std::map<int, job::RankHealth>& health() const { return health_; }
  std::vector<base::RankSnapshot> snapshots() const;
  /// "lockstep: where the ranks were:" and one line per rank; empty if no operation is known.
  std::string text() const;

 private:
  using Clock = job::StallTimer::Clock;
  const int world_size_;
  const job::HealthLimits limits_;
  std::map<int, job::RankHealth> health_;       // the last report of each running rank
  std::optional<Clock::time_point> last_left_;  // when a rank last left its world
  std::set<int> warned_;                        // ranks whose silence was reported
  std::map<int, base::RankSnapshot> snapshots_;
};

}  // namespace lockstep::launcher
