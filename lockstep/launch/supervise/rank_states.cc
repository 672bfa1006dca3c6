#include "lockstep/launch/supervise/rank_states.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/job/health/progress_report.h"

namespace lockstep::launcher {
namespace {

constexpr std::chrono::seconds kSilenceWarning{5};

}  // namespace

bool RankStates::add(const job::RankHealth& pulse) {
  const auto before = health_.find(pulse.rank);
  if (before != health_.end() && before->second.is_in_world && !pulse.is_in_world) last_left_ = Clock::now();
  health_[pulse.rank] = pulse;
  if (pulse.since_heartbeat >= kSilenceWarning) return limits_.stall.count() > 0 && warned_.insert(pulse.rank).second;
  warned_.erase(pulse.rank);
  return false;
}

void RankStates::ended(int rank) {
  if (health_.erase(rank) > 0) last_left_ = Clock::now();
}

void RankStates::add(base::RankSnapshot seen) {
  const int rank = seen.rank;
  snapshots_[rank] = std::move(seen);
}

std::optional<job::HangFinding> RankStates::find_hang() const {
  std::vector<job::RankHealth> all;
  for (const auto& [rank, pulse] : health_) all.push_back(pulse);
  const auto finding = job::find_hang(all, world_size_, limits_);
  const bool just_left = last_left_ && Clock::now() - *last_left_ < limits_.hang;
  return finding && finding->cause == base::Cause::kRankStuck && just_left ? std::nullopt : finding;
}

std::vector<base::RankSnapshot> RankStates::ranks() const {
  std::vector<base::RankSnapshot> all;
  for (const auto& [rank, seen] : snapshots_) all.push_back(seen);
  return all;
}

std::string RankStates::text() const {
  const auto has_done = [](const auto& flight) { return !flight.second.operations.empty(); };
  if (std::none_of(snapshots_.begin(), snapshots_.end(), has_done)) return "";
  return "lockstep: where the ranks were:\n" + job::progress_report(ranks());
}

}  // namespace lockstep::launcher
