#include "lockstep/launch/supervise/verdict.h"

#include <signal.h>

#include <algorithm>

#include "lockstep/base/parse.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/launch/process/stack_dump.h"

namespace lockstep::launcher {
namespace {

bool is_death(const RankEnd& end) { return end.signal != 0 && end.signal != SIGABRT; }

std::string hint_for(const RankEnd& end, const Evidence& evidence) {
  const std::string shown = !evidence.tail.empty() ? "the last lines of its stderr stand above" : "";
  switch (end.signal) {
    case 0: return shown;
    case SIGKILL:
      return end.oom_kills > 0 ? "lower batch_size, or run fewer ranks on this host"
                               : "Lockstep did not send it: a person or the out-of-memory killer did (dmesg tells)";
    case SIGSEGV:
    case SIGBUS:
    case SIGILL:
    case SIGFPE: return "a defect in the program or a library: start it with ulimit -c unlimited, or under gdb";
    default: return shown;
  }
}

/// What a process that aborts has said about it: what() of an exception, else its last words. `prefix` stands in front
/// of each line.
std::string words_in(const std::string& tail, const std::string& prefix) {
  std::string said;
  for (std::string line : base::split(tail, '\n')) {
    if (line.starts_with(prefix)) line.erase(0, prefix.size());
    const std::size_t what = line.find("  what():  ");
    if (what != std::string::npos) return line.substr(what + 2);
    if (line.find_first_not_of(" \t\r") != std::string::npos) said = line;
  }
  return said;
}

std::string detail_for(const RankEnd& end, const Evidence& evidence) {
  std::string detail = to_text(end);
  if (end.signal == SIGABRT && !evidence.tail.empty())
    detail += "; it said: " + words_in(evidence.tail, evidence.prefix);
  if (end.signal == SIGKILL && end.oom_kills > 0)
    detail += "; the kernel counts " + std::to_string(end.oom_kills) +
              (end.oom_kills == 1 ? " out-of-memory kill" : " out-of-memory kills");
  return detail;
}

}  // namespace

const RankEnd* first_failure(const std::vector<RankEnd>& ends) {
  const RankEnd* first = nullptr;
  for (const RankEnd& end : ends)
    if (end.failed() && (!first || (is_death(end) && !is_death(*first)))) first = &end;
  return first;
}

Verdict judge(const RankEnd& end, const Evidence& evidence) {
  Verdict verdict;
  job::Fatal& fatal = verdict.fatal;
  if (evidence.published) {
    fatal = *evidence.published;
    const auto rank = static_cast<std::size_t>(fatal.rank);
    if (fatal.rank >= 0 && rank < evidence.places.size()) {
      if (fatal.host.empty()) fatal.host = evidence.places[rank].host;
      if (fatal.pid < 0) fatal.pid = evidence.places[rank].pid;
    }
    const bool own_code = fatal.cause == base::Cause::kRankExited || fatal.cause == base::Cause::kRankDied;
    verdict.exit_code = own_code ? end.exit_code() : base::exit_code(fatal.cause);
    return verdict;
  }
  fatal.cause = end.signal != 0 ? base::Cause::kRankDied : base::Cause::kRankExited;
  fatal.rank = end.rank;
  if (static_cast<std::size_t>(end.rank) < evidence.places.size())
    fatal.host = evidence.places[static_cast<std::size_t>(end.rank)].host;
  fatal.pid = end.pid;
  fatal.detail = detail_for(end, evidence);
  fatal.hint = hint_for(end, evidence);
  verdict.exit_code = end.exit_code();
  return verdict;
}

void add_place(job::Fatal& fatal, const std::vector<base::RankSeen>& ranks) {
  const auto seen =
      std::find_if(ranks.begin(), ranks.end(), [&](const base::RankSeen& one) { return one.rank == fatal.rank; });
  if (seen == ranks.end()) return;
  if (fatal.step < 0) fatal.step = seen->steps;
  if (!fatal.op.empty()) return;
  if (const auto* now = job::under_way(*seen))
    fatal.op = job::label(*now);
  else if (const auto* last = job::last_finished(*seen))
    fatal.detail += "; the last operation that it finished was " + job::describe(*last);
}

std::string place_of_stack(const std::string& run_dir, int rank, const std::vector<RankPlace>& places) {
  const bool several = std::any_of(places.begin(), places.end(),
                                   [&](const RankPlace& place) { return place.host != places.front().host; });
  const bool known = rank >= 0 && static_cast<std::size_t>(rank) < places.size();
  return run_dir + "/" + stack_file(rank) +
         (several && known ? " on " + places[static_cast<std::size_t>(rank)].host : "");
}

void add_stack(Verdict& verdict, const std::vector<RankEnd>& ends, const std::string& run_dir,
               const std::vector<RankPlace>& places) {
  const int rank = verdict.fatal.rank;
  const bool ended = std::any_of(ends.begin(), ends.end(), [&](const RankEnd& end) { return end.rank == rank; });
  if (verdict.fatal.cause != base::Cause::kRankStuck || rank < 0 || ended || !verdict.stacks.empty()) return;
  verdict.stacks = {rank};
  verdict.fatal.hint = "its stack is in " + place_of_stack(run_dir, rank, places) +
                       (verdict.fatal.hint.empty() ? "" : "; " + verdict.fatal.hint);
}

}  // namespace lockstep::launcher
