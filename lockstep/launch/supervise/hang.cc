#include "lockstep/launch/supervise/hang.h"

#include <algorithm>

#include "lockstep/job/health/progress_report.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kMostStacks = 8;

std::string seconds(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::round<std::chrono::seconds>(time).count()) + " s";
}

std::string why_silent(char state) {
  switch (state) {
    case 'T': return "; it is stopped by a signal (state T)";
    case 'D': return "; it hangs in the kernel (state D)";
    case '?': return "";
    default: return std::string("; its process is in state ") + state;
  }
}

job::Fatal of_rank(base::Cause cause, int rank, const std::vector<RankPlace>& places) {
  job::Fatal fatal;
  fatal.cause = cause;
  fatal.rank = rank;
  if (rank < 0 || static_cast<std::size_t>(rank) >= places.size()) return fatal;
  fatal.host = places[static_cast<std::size_t>(rank)].host;
  fatal.pid = places[static_cast<std::size_t>(rank)].pid;
  return fatal;
}

/// "ranks 0,1 wait in all_reduce(fc)#12 of world": those of the largest group that waits.
std::string who_waits(const std::vector<base::RankSeen>& ranks) {
  std::map<std::string, std::vector<int>> groups;
  for (const base::RankSeen& rank : ranks)
    if (const auto* now = job::under_way(rank); now && rank.waiting) groups[job::describe(*now)].push_back(rank.rank);
  const auto most = std::max_element(groups.begin(), groups.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most == groups.end()) return "";
  return "; " + job::list_of_ranks(most->second) + (most->second.size() == 1 ? " waits in " : " wait in ") +
         most->first;
}

std::string where_is(const base::RankSeen& rank) {
  const auto* now = job::under_way(rank);
  std::string text = "; rank " + std::to_string(rank.rank) + " finished " + std::to_string(rank.steps) +
                     (rank.steps == 1 ? " step" : " steps") + " and ";
  if (rank.waiting && now) return text + "waits in " + job::describe(*now);
  return text + "is in user code" + (rank.busy_with.empty() ? "" : ", busy with " + rank.busy_with);
}

}  // namespace

job::Fatal silence_of(const job::Pulse& pulse, const std::vector<RankPlace>& places, const job::PulseLimits& limits) {
  job::Fatal fatal = of_rank(base::Cause::kRankStalled, pulse.rank, places);
  fatal.detail = "no sign of life for " + seconds(pulse.silent) + why_silent(pulse.state);
  fatal.hint = "the job ends when it lasts " + seconds(limits.stall) + " (--stall-timeout)";
  return fatal;
}

Verdict judge_hang(const job::Finding& finding, const std::map<int, job::Pulse>& pulses,
                   const std::vector<base::RankSeen>& ranks, const HangEvidence& evidence) {
  const bool stalled = finding.cause == base::Cause::kRankStalled;
  Verdict verdict;
  verdict.exit_code = base::exit_code(finding.cause);
  verdict.stacks = stalled || ranks.empty() ? finding.ranks : job::to_blame(ranks);
  if (verdict.stacks.empty()) verdict.stacks = finding.ranks;
  if (verdict.stacks.size() > kMostStacks) verdict.stacks.resize(kMostStacks);
  const int rank = verdict.stacks.front();
  verdict.fatal = of_rank(finding.cause, rank, evidence.places);
  const auto pulse = pulses.find(rank);
  if (stalled) {
    verdict.fatal.detail = "no sign of life for " + seconds(evidence.limits.stall) +
                           (pulse == pulses.end() ? "" : why_silent(pulse->second.state));
  } else {
    verdict.fatal.detail = "no progress for " + seconds(evidence.limits.hang);
    if (pulse != pulses.end() && pulse->second.state == 'T') verdict.fatal.detail += why_silent('T');
  }
  verdict.fatal.detail += who_waits(ranks);
  const auto seen =
      std::find_if(ranks.begin(), ranks.end(), [&](const base::RankSeen& one) { return one.rank == rank; });
  if (seen != ranks.end() && !stalled) verdict.fatal.detail += where_is(*seen);
  verdict.fatal.hint = "its stack is in " + place_of_stack(evidence.run_dir, rank, evidence.places) +
                       (stalled ? "" : "; long work goes under world.busy(), --hang-timeout sets the limit");
  return verdict;
}

}  // namespace lockstep::launcher
