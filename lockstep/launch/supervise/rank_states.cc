#include "lockstep/launch/supervise/rank_states.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/timeouts.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::supervise {
namespace {

using enum job::health::RankPhase;

constexpr int kWindowSteps = 20;
constexpr int kWindowLooks = 20;
/// Parts per million. Over NCCL, an operation may be pending at every look; a few looks at which none is say little.
constexpr std::int64_t kLeastWork = 100'000;

}  // namespace

std::vector<protocol::RankLocation> rank_locations(const std::vector<plan::Node>& nodes) {
  std::vector<protocol::RankLocation> locations;
  for (const plan::Node& node : nodes)
    locations.insert(locations.end(), static_cast<std::size_t>(node.ranks), {node.name, -1});
  return locations;
}

protocol::RankLocation& location_of(int rank, std::vector<protocol::RankLocation>& locations) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= locations.size())
    protocol::throw_protocol_error("a frame of rank " + std::to_string(rank) + "; expected 0 to " +
                                   std::to_string(locations.size() - 1));
  return locations[static_cast<std::size_t>(rank)];
}

std::vector<std::string> rank_prefixes(const std::vector<protocol::RankLocation>& locations, bool with_hosts) {
  std::vector<std::string> prefixes;
  for (const protocol::RankLocation& location : locations)
    prefixes.push_back(plan::rank_prefix(static_cast<int>(prefixes.size()), with_hosts ? location.host : ""));
  return prefixes;
}

bool RankStates::add(const job::health::RankHealth& health) {
  const auto before = health_.find(health.rank);
  if (before != health_.end() && before->second.phase == kInWorld && health.phase != kInWorld)
    last_left_ = Clock::now();
  health_[health.rank] = health;
  if (health.since_heartbeat >= base::kSilenceWarning)
    return limits_.stall.count() > 0 && warned_.insert(health.rank).second;
  warned_.erase(health.rank);
  return false;
}

void RankStates::on_rank_exit(int rank) {
  const auto found = health_.find(rank);
  if (found == health_.end()) return;
  if (found->second.phase != job::health::RankPhase::kAfterWorld) last_left_ = Clock::now();
  health_.erase(found);
}

void RankStates::add(base::telemetry::RankSnapshot snapshot) {
  const int rank = snapshot.rank;
  snapshots_[rank] = std::move(snapshot);
}

std::optional<job::health::HangFinding> RankStates::find_hang() const {
  std::vector<job::health::RankHealth> all;
  for (const auto& [rank, health] : health_) all.push_back(health);
  const auto finding = job::health::find_hang(all, world_size_, limits_);
  const bool just_left = last_left_ && Clock::now() - *last_left_ < limits_.hang;
  return finding && finding->kind == job::health::HangKind::kHang && just_left ? std::nullopt : finding;
}

std::optional<job::health::Straggler> RankStates::find_straggler() {
  std::vector<std::uint64_t> work;  // parts per million of the looks that found no operation pending
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto now = health_.find(rank);
    if (now == health_.end() || now->second.phase != kInWorld || now->second.looks == 0) {
      window_begin_.clear();
      return std::nullopt;
    }
    const job::health::RankHealth& begin = window_begin_.try_emplace(rank, now->second).first->second;
    const std::int64_t looks = now->second.looks - begin.looks;
    if (looks < kWindowLooks || now->second.steps - begin.steps < kWindowSteps) continue;
    const std::int64_t pending = now->second.pending_looks - begin.pending_looks;
    work.push_back(static_cast<std::uint64_t>(std::max(kLeastWork, 1'000'000 * (looks - pending) / looks)));
  }
  if (work.size() < static_cast<std::size_t>(world_size_)) return std::nullopt;
  window_begin_ = health_;
  return straggler_detector_.add_window(work);
}

std::vector<base::telemetry::RankSnapshot> RankStates::snapshots() const {
  std::vector<base::telemetry::RankSnapshot> all;
  for (const auto& [rank, snapshot] : snapshots_) all.push_back(snapshot);
  return all;
}

std::string RankStates::text() const {
  const auto has_done = [](const auto& flight) { return !flight.second.operations.empty(); };
  if (std::ranges::none_of(snapshots_, has_done)) return "";
  return "lockstep: where the ranks were:\n" + job::health::progress_report(snapshots());
}

}  // namespace lockstep::launcher::supervise
