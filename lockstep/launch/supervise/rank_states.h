// What agents have told of ranks while they lived.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"

namespace lockstep::launcher {

class RankStates {
 public:
  RankStates(int world_size, const job::HealthLimits& limits) : world_size_(world_size), limits_(limits) {}

  /// True when it is the first of a silence that is worth a warning.
  bool add(const job::RankHealth& pulse);
  void add(base::RankSnapshot seen);
  /// The process of `rank` has.
  void ended(int rank);

  /// As the last pulses say. That a rank leaves is progress: those who stay have just been released by it, and their
  /// pulses may be older.
  std::optional<job::HangFinding> find_hang() const;

  const std::map<int, job::RankHealth>& health() const { return health_; }
  std::vector<base::RankSnapshot> ranks() const;
  /// "lockstep: where the ranks were:" and lines of it; empty when no operation is known.
  std::string text() const;

 private:
  using Clock = job::StallTimer::Clock;
  const int world_size_;
  const job::HealthLimits limits_;
  std::map<int, job::RankHealth> health_;       // of ranks that run; the last ones
  std::optional<Clock::time_point> last_left_;  // when the last one did that has left its world
  std::set<int> warned_;                        // of the silence of these
  std::map<int, base::RankSnapshot> snapshots_;
};

}  // namespace lockstep::launcher
