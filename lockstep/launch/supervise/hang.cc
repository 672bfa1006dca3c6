#include "lockstep/launch/supervise/hang.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/base/parse.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/job/python_exception.h"

namespace lockstep::launcher::supervise {
namespace {

constexpr std::size_t kMaxStacks = 8;

std::string seconds(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::round<std::chrono::seconds>(time).count()) + " s";
}

std::string process_state_text(char state) {
  switch (state) {
    case 'T': return "; the process is stopped by a signal (state T)";
    case 'D': return "; the process is blocked in the kernel (state D)";
    case '?': return "";
    default: return std::string("; the process is in state ") + state;
  }
}

/// Returns whether the rank's program uses torch.distributed, also over Lockstep.
bool is_watched(const base::telemetry::RankSnapshot& rank) { return rank.transport.starts_with("torch.distributed"); }

/// Operations of these kinds have the same size on all ranks.
bool is_same_size(const std::string& kind) {
  return kind == "all_reduce" || kind == "broadcast" || kind == "reduce" || kind == "all_gather" ||
         kind == "reduce_scatter";
}

/// A rank whose waiting call differs from that of other ranks in the same operation, and both calls.
struct DifferentCalls {
  int rank = -1;
  std::vector<int> suspects{};  // those that made this call; all, if as many made the other one
  std::string detail;
};

/// Compares the calls in which ranks wait for each other. Lockstep compares its own before data move; this is for
/// programs that are watched from outside. The minority is at fault, or the higher rank where there is none.
std::optional<DifferentCalls> find_different_calls(const std::vector<base::telemetry::RankSnapshot>& ranks) {
  using Call = std::pair<std::string, std::vector<int>>;  // the call, and the ranks that wait in it
  std::map<std::pair<std::string, std::uint64_t>, std::vector<Call>> operations;
  for (const base::telemetry::RankSnapshot& rank : ranks) {
    const auto* now = job::health::current_operation(rank);
    if (!rank.has_left && (!now || !rank.waiting)) return std::nullopt;  // the others wait for this one
    if (rank.has_left || !is_watched(rank) || now->channel == job::health::kPythonCalls) continue;
    const std::string call = now->kind + (!is_same_size(now->kind) || now->bytes == 0
                                              ? "()"
                                              : "(" + std::to_string(now->bytes) + " bytes of " + now->dtype + ")");
    std::vector<Call>& calls = operations[{now->channel, now->seq}];
    auto found = std::ranges::find(calls, call, &Call::first);
    if (found == calls.end()) found = calls.insert(calls.end(), {call, {}});
    found->second.push_back(rank.rank);
  }
  for (auto& [position, calls] : operations) {
    if (calls.size() < 2) continue;
    std::ranges::stable_sort(calls, [](const Call& a, const Call& b) { return a.second.size() > b.second.size(); });
    DifferentCalls result{.rank = calls.back().second.back()};
    for (const auto& [call, callers] : calls) {
      if (callers.size() == calls.back().second.size())
        result.suspects.insert(result.suspects.end(), callers.begin(), callers.end());
      result.detail += (result.detail.empty() ? "" : ", ") + job::health::format_ranks(callers) + " called " + call;
    }
    result.detail += " as operation " + std::to_string(position.second) + " of " + position.first;
    return result;
  }
  return std::nullopt;
}

/// Describes the largest group of ranks that wait in one operation: "ranks 0,1 wait in all_reduce(fc)#12 of world".
std::string waiting_text(const std::vector<base::telemetry::RankSnapshot>& ranks) {
  std::map<std::string, std::vector<int>> groups;
  for (const base::telemetry::RankSnapshot& rank : ranks)
    if (const auto* now = job::health::current_operation(rank); now && rank.waiting)
      groups[job::health::describe(*now)].push_back(rank.rank);
  const auto most =
      std::ranges::max_element(groups, [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most == groups.end()) return "";
  return "; " + job::health::format_ranks(most->second) + (most->second.size() == 1 ? " waits in " : " wait in ") +
         most->first;
}

/// `is_ours`: the program uses Lockstep, and not torch.distributed.
std::string hint_text(job::health::HangKind kind, bool is_ours) {
  switch (kind) {
    case job::health::HangKind::kStall: return "";
    case job::health::HangKind::kHang:
      return is_ours ? "; wrap long work in world.busy(), or raise --hang-timeout"
                     : "; if the rank waits for something else, raise --hang-timeout";
    case job::health::HangKind::kWork: return "; if it is no endless loop, raise --work-timeout";
    case job::health::HangKind::kIdle: return "; raise --idle-timeout if the program waits for something";
  }
  return "";
}

std::string location_text(const base::telemetry::RankSnapshot& rank) {
  if (rank.has_left)
    return "; rank " + std::to_string(rank.rank) + " has left its world, and its process has not ended";
  const auto* now = job::health::current_operation(rank);
  std::string text = "; rank " + std::to_string(rank.rank) + " finished " + std::to_string(rank.steps) +
                     (rank.steps == 1 ? " step" : " steps") + " and ";
  if (rank.waiting && now) return text + "waits in " + job::health::describe(*now);
  return text + "is in user code" + (rank.busy_with.empty() ? "" : ", busy with " + rank.busy_with);
}

/// The ranks that keep the others from continuing: those that have not joined the world, or else the culprits.
std::vector<int> hanging_ranks(const job::health::HangFinding& finding,
                               const std::map<int, job::health::RankHealth>& health,
                               const std::vector<base::telemetry::RankSnapshot>& ranks) {
  std::vector<int> absent;
  for (const int rank : finding.ranks)
    if (const auto found = health.find(rank);
        found != health.end() && found->second.phase == job::health::RankPhase::kBeforeWorld)
      absent.push_back(rank);
  if (absent.empty()) absent = job::health::culprit_ranks(ranks);
  return absent.empty() ? finding.ranks : absent;
}

/// Returns the rank of these that waits while it handles an exception; null if there is none, or if all that
/// wait do, as in a program that trains in an except block.
const base::telemetry::RankSnapshot* find_failed(const std::vector<base::telemetry::RankSnapshot>& ranks,
                                                 const std::vector<int>& suspects) {
  const auto has_failed = [](const base::telemetry::RankSnapshot& rank) {
    return rank.waiting && !rank.handles.empty();
  };
  if (std::ranges::all_of(ranks, [&](const auto& rank) { return !rank.waiting || has_failed(rank); })) return nullptr;
  const auto failed = std::ranges::find_if(ranks, [&](const auto& rank) {
    return has_failed(rank) && std::ranges::find(suspects, rank.rank) != suspects.end();
  });
  return failed == ranks.end() ? nullptr : &*failed;
}

Verdict judge_failed(const base::telemetry::RankSnapshot& rank, const std::string& then, const HangEvidence& evidence) {
  Verdict verdict =
      verdict_on({.cause = base::Cause::kRankExited,
                  .detail = job::PythonException{rank.handles, then}.text(),
                  .hint = "its clean-up (finally, except, __exit__) waits for calls that the others do not make"});
  set_rank(verdict.fatal, rank.rank, evidence.locations);
  add_remedy(verdict.fatal, {.locations = {}, .own_errors = evidence.own_errors});
  verdict.stacks = {rank.rank};
  return verdict;
}

}  // namespace

job::Fatal stall_warning(const job::health::RankHealth& health, const std::vector<protocol::RankLocation>& locations,
                         const job::health::HealthLimits& limits) {
  job::Fatal fatal{
      .cause = base::Cause::kRankStalled,
      .detail = "no heartbeat for " + seconds(health.since_heartbeat) + process_state_text(health.process_state),
      .hint = "the job is stopped after " + seconds(limits.stall) + " without a heartbeat (--stall-timeout)"};
  set_rank(fatal, health.rank, locations);
  return fatal;
}

job::Fatal straggler_warning(const job::health::Straggler& straggler,
                             const std::map<int, job::health::RankHealth>& health,
                             const std::vector<protocol::RankLocation>& locations) {
  job::Fatal fatal = job::health::warning_of(straggler, straggler.rank);
  set_rank(fatal, straggler.rank, locations);
  fatal.step = health.at(straggler.rank).steps;
  return fatal;
}

void add_python_location(Verdict& verdict, int rank, const std::string& location) {
  constexpr std::size_t kMaxLength = 300;
  if (verdict.fatal.rank == rank)
    verdict.fatal.detail += "; it is at " + base::telemetry::printable(location.substr(0, kMaxLength));
}

void add_stacks(Verdict& verdict, int rank, const std::string& text) {
  constexpr std::string_view kInFile = "its stack is in ";
  verdict.printed_stacks += "lockstep: stacks of rank " + std::to_string(rank) + ":\n";
  for (const std::string& line : base::split(text, '\n'))
    if (!line.empty()) verdict.printed_stacks += "  " + base::escaped(line, 512) + "\n";
  std::string& hint = verdict.fatal.hint;
  if (rank == verdict.fatal.rank && hint.starts_with(kInFile) && text.find('\n') + 1 < text.size())
    hint = "its stack is above" + hint.substr(std::min(hint.find(';'), hint.size()));
}

Verdict judge_hang(const job::health::HangFinding& finding, const std::map<int, job::health::RankHealth>& health,
                   const std::vector<base::telemetry::RankSnapshot>& ranks, const HangEvidence& evidence) {
  using job::health::HangKind;
  Verdict verdict = verdict_on({.cause = finding.cause()});
  verdict.stacks = finding.kind == HangKind::kHang ? hanging_ranks(finding, health, ranks) : finding.ranks;
  if (verdict.stacks.size() > kMaxStacks) verdict.stacks.resize(kMaxStacks);
  const auto different = finding.kind == HangKind::kHang ? find_different_calls(ranks) : std::nullopt;
  if (finding.kind == HangKind::kHang)
    if (const auto* failed = find_failed(ranks, different ? different->suspects : verdict.stacks))
      return judge_failed(*failed, different ? different->detail : "no progress for " + seconds(evidence.limits.hang),
                          evidence);
  if (different) {
    verdict.exit_code = base::exit_code(base::Cause::kDesync);
    verdict.fatal = {.cause = base::Cause::kDesync, .detail = different->detail, .hint = job::kDesyncHint};
    set_rank(verdict.fatal, different->rank, evidence.locations);
    return verdict;
  }
  const int rank = verdict.stacks.front();
  set_rank(verdict.fatal, rank, evidence.locations);
  const auto rank_health = health.find(rank);
  const char state = rank_health == health.end() ? '?' : rank_health->second.process_state;
  switch (finding.kind) {
    case HangKind::kStall:
      verdict.fatal.detail = "no heartbeat for " + seconds(evidence.limits.stall) + process_state_text(state);
      break;
    case HangKind::kHang:
      verdict.fatal.detail =
          "no progress for " + seconds(evidence.limits.hang) + (state == 'T' ? process_state_text('T') : "");
      break;
    case HangKind::kWork:
      verdict.fatal.detail = "it has worked for " + seconds(evidence.limits.work) + " without reporting progress";
      break;
    case HangKind::kIdle:
      verdict.fatal.detail = "no process of any rank has used CPU time for " + seconds(evidence.limits.idle);
      break;
  }
  verdict.fatal.detail += waiting_text(ranks);
  if (rank_health != health.end() && rank_health->second.phase == job::health::RankPhase::kBeforeWorld)
    verdict.fatal.detail += "; rank " + std::to_string(rank) + " has not joined the world";
  const auto snapshot = std::ranges::find(ranks, rank, &base::telemetry::RankSnapshot::rank);
  if (snapshot != ranks.end() && finding.kind != HangKind::kStall) verdict.fatal.detail += location_text(*snapshot);
  verdict.fatal.hint = "its stack is in " + stack_location(evidence.run_dir, rank, evidence.locations) +
                       hint_text(finding.kind, std::ranges::none_of(ranks, is_watched));
  return verdict;
}

}  // namespace lockstep::launcher::supervise
