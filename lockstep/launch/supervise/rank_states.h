// Stores the reports of agents about running ranks.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/health/straggler_detector.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::supervise {

/// Returns the location of each rank, in the order of ranks. Pure.
std::vector<protocol::RankLocation> rank_locations(const std::vector<plan::Node>& nodes);
/// Returns where `rank` runs. Throws Error kProtocol if there is no such rank.
protocol::RankLocation& location_of(int rank, std::vector<protocol::RankLocation>& locations);
/// Returns the prefix of each rank's lines. Pure.
std::vector<std::string> rank_prefixes(const std::vector<protocol::RankLocation>& locations, bool with_hosts);

/// Collects the health reports and snapshots of all ranks. Not thread-safe.
class RankStates {
 public:
  RankStates(int world_size, const job::health::HealthLimits& limits)
      : world_size_(world_size), limits_(limits), straggler_detector_(world_size) {}

  /// Stores a health report. Returns whether the caller should print a warning: the rank has had no heartbeat for 5 s,
  /// and there was no warning yet since its last heartbeat.
  bool add(const job::health::RankHealth& health);
  void add(base::telemetry::RankSnapshot snapshot);
  /// Call it when the process of `rank` has exited.
  void on_rank_exit(int rank);

  /// Calls job::health::find_hang() with the last health reports. Does not return kHang within the limit after a
  /// rank has left its world: it has just released the other ranks, whose last reports may be older.
  std::optional<job::health::HangFinding> find_hang() const;

  /// Returns a rank that the others wait for, step by step, in a program that is watched from outside: once after three
  /// windows, each of at least 20 steps and 20 looks of all ranks. Call it after add().
  std::optional<job::health::Straggler> find_straggler();

  const std::map<int, job::health::RankHealth>& health() const { return health_; }
  std::vector<base::telemetry::RankSnapshot> snapshots() const;
  /// Returns "lockstep: where the ranks were:" and job::health::progress_report(); empty if no rank has recorded an
  /// operation.
  std::string text() const;

 private:
  using Clock = job::health::StallTimer::Clock;
  const int world_size_;
  const job::health::HealthLimits limits_;
  std::map<int, job::health::RankHealth> health_;  // the last report of each running rank
  std::optional<Clock::time_point> last_left_;     // when a rank last left its world
  std::set<int> warned_;                           // ranks for which add() has returned true
  std::map<int, base::telemetry::RankSnapshot> snapshots_;
  job::health::StragglerDetector straggler_detector_;
  std::map<int, job::health::RankHealth> window_begin_;  // the reports with which the window of find_straggler() began
};

}  // namespace lockstep::launcher::supervise
