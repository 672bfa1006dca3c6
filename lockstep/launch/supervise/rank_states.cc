#include "lockstep/launch/supervise/rank_states.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/job/health/progress_report.h"

namespace lockstep::launcher {
namespace {

constexpr std::chrono::seconds kSilenceIsOdd{5};

}  // namespace

bool Observed::add(const job::Pulse& pulse) {
  const auto before = pulses_.find(pulse.rank);
  if (before != pulses_.end() && before->second.in_world && !pulse.in_world) left_ = Clock::now();
  pulses_[pulse.rank] = pulse;
  if (pulse.silent >= kSilenceIsOdd) return limits_.stall.count() > 0 && warned_.insert(pulse.rank).second;
  warned_.erase(pulse.rank);
  return false;
}

void Observed::ended(int rank) {
  if (pulses_.erase(rank) > 0) left_ = Clock::now();
}

void Observed::add(base::RankSeen seen) {
  const int rank = seen.rank;
  flights_[rank] = std::move(seen);
}

std::optional<job::Finding> Observed::find_stuck() const {
  std::vector<job::Pulse> all;
  for (const auto& [rank, pulse] : pulses_) all.push_back(pulse);
  const auto finding = job::find_stuck(all, world_size_, limits_);
  const bool just_left = left_ && Clock::now() - *left_ < limits_.hang;
  return finding && finding->cause == base::Cause::kRankStuck && just_left ? std::nullopt : finding;
}

std::vector<base::RankSeen> Observed::ranks() const {
  std::vector<base::RankSeen> all;
  for (const auto& [rank, seen] : flights_) all.push_back(seen);
  return all;
}

std::string Observed::text() const {
  const auto has_done = [](const auto& flight) { return !flight.second.operations.empty(); };
  if (std::none_of(flights_.begin(), flights_.end(), has_done)) return "";
  return "lockstep: where the ranks were:\n" + job::wavefront(ranks());
}

}  // namespace lockstep::launcher
