#include "lockstep/launch/supervise/verdict.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/parse.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/job/python_exception.h"
#include "lockstep/launch/process/stack_dump.h"

namespace lockstep::launcher::supervise {
namespace {

constexpr const char* kStderrHint = "the last lines of its stderr are above";

/// How likely it is that this failure caused the others.
int precedence(const protocol::RankExit& end) {
  if (end.signal != 0 && end.signal != SIGABRT) return 2;
  return end.lost_peer ? 0 : 1;
}

/// Returns the row for an error, or else for the last lines before it; null if there is none.
const KnownError* remedy_for(const std::string& error, const ExitEvidence& evidence) {
  for (const std::vector<KnownError>* table : {&evidence.own_errors, &known_errors()})
    for (const std::string* text : {&error, &evidence.tail})
      if (const KnownError* known = find_known_error(*text, *table)) return known;
  return nullptr;
}

/// The first line of the last ones with the text of a known error.
std::string text_with(const KnownError& known, const ExitEvidence& evidence) {
  for (const std::string& line : base::split(evidence.tail, '\n'))
    if (find_known_error(line, {known}))
      return line.substr(line.starts_with(evidence.prefix) ? evidence.prefix.size() : 0);
  return "";
}

std::string hint_for(const protocol::RankExit& end, const ExitEvidence& evidence) {
  const std::string stderr_hint = evidence.tail.empty() ? "" : kStderrHint;
  switch (end.signal) {
    case 0: return stderr_hint;
    case SIGKILL:
      return end.oom_kills > 0
                 ? "lower batch_size, or run fewer ranks on this host"
                 : "Lockstep did not send it: check dmesg for the out-of-memory killer, or who else sent it";
    case SIGSEGV:
    case SIGBUS:
    case SIGILL:
    case SIGFPE: return "find the defect in the program or a library: run it with ulimit -c unlimited, or under gdb";
    default: return stderr_hint;
  }
}

/// Returns the message of a process that aborted: the what() of an exception, else the last line, without `prefix`.
std::string last_message(const std::string& tail, const std::string& prefix) {
  std::string message;
  for (std::string line : base::split(tail, '\n')) {
    if (line.starts_with(prefix)) line.erase(0, prefix.size());
    const std::size_t what = line.find("  what():  ");
    if (what != std::string::npos) return line.substr(what + 2);
    if (line.find_first_not_of(" \t\r") != std::string::npos) message = line;
  }
  return message;
}

std::string detail_for(const protocol::RankExit& end, const ExitEvidence& evidence) {
  std::string detail = protocol::to_text(end);
  if (end.signal == 0) {
    // What it wrote to its error file, or else to stderr.
    const auto exception = end.message.empty()
                               ? job::find_python_exception(evidence.tail, evidence.prefix)
                               : job::find_python_exception(std::string(job::kTraceback) + "\n" + end.message);
    const std::string text = exception.last.empty() ? end.message.substr(0, end.message.find('\n')) : exception.text();
    if (!text.empty()) return detail + ": " + text;
  }
  if (end.signal == SIGABRT && !evidence.tail.empty())
    detail += "; its last message: " + last_message(evidence.tail, evidence.prefix);
  if (end.signal == SIGKILL && end.oom_kills > 0)
    detail += "; the kernel counts " + std::to_string(end.oom_kills) +
              (end.oom_kills == 1 ? " out-of-memory kill" : " out-of-memory kills");
  return detail;
}

/// Whether the error of `failure` names a port of `end`. Gloo, up to that of torch 2.11 at least, prints the two bytes
/// of a port in the order in which they are sent.
bool is_named(const protocol::RankExit& end, const protocol::RankExit& failure) {
  const std::int64_t swapped = (failure.lost_port >> 8) | (failure.lost_port & 0xff) << 8;
  return failure.lost_port != 0 && std::ranges::any_of(end.ports, [&](std::int64_t port) {
           return port == failure.lost_port || port == swapped;
         });
}

Verdict judge_early_end(const protocol::RankExit& end, const ExitEvidence& evidence) {
  job::Fatal fatal{.cause = base::Cause::kUnevenInput};
  const bool is_known = evidence.early_ends.size() == 1;
  if (is_known) set_rank(fatal, evidence.early_ends[0], evidence.locations);
  const std::string other = "rank " + std::to_string(end.rank);
  fatal.detail = (is_known ? "" : job::health::format_ranks(evidence.early_ends) + " ") + "exited with code 0 while " +
                 other + " still needed " + (is_known ? "it; " : "one of them; ") + other + ": " +
                 last_message(evidence.tail, evidence.prefix);
  fatal.hint = "give every rank the same number of batches, and let all ranks make the same calls before they end";
  return verdict_on(std::move(fatal));
}

/// Whether another rank has published that this one had left.
bool is_left_rank(const job::Fatal& cause, int rank) {
  return cause.cause == base::Cause::kUnevenInput && cause.pid < 0 && cause.rank == rank;
}

}  // namespace

Verdict verdict_on(job::Fatal fatal) {
  const int code = base::exit_code(fatal.cause);
  return {.fatal = std::move(fatal), .exit_code = code};
}

void set_rank(job::Fatal& fatal, int rank, const std::vector<protocol::RankLocation>& locations) {
  fatal.rank = rank;
  if (rank < 0 || static_cast<std::size_t>(rank) >= locations.size()) return;
  const protocol::RankLocation& location = locations[static_cast<std::size_t>(rank)];
  if (fatal.host.empty()) fatal.host = location.host;
  if (fatal.pid < 0) fatal.pid = location.pid;
}

const protocol::RankExit* first_failure(const std::vector<protocol::RankExit>& exits) {
  const protocol::RankExit* first = nullptr;
  for (const protocol::RankExit& end : exits)
    if (end.failed() && (!first || precedence(end) > precedence(*first))) first = &end;
  return first;
}

void add_lost_peer(protocol::RankExit& end, const std::string& tail, const std::string& prefix) {
  // Lines before the exception may be about other connections.
  const std::string exception = job::find_python_exception(tail, prefix).first;
  const std::string& text = exception.empty() ? tail : exception;
  end.lost_peer = (end.signal == 0 || end.signal == SIGABRT) && is_victim(text);
  end.lost_port = end.lost_peer ? lost_port(text) : 0;
}

std::vector<int> early_ends(const std::vector<protocol::RankExit>& exits, const protocol::RankExit& failure) {
  std::vector<int> before, named;
  bool has_failed = false;
  for (const protocol::RankExit& end : exits) {
    has_failed |= end.rank == failure.rank;
    if (end.code != 0 || end.signal != 0) continue;
    if (!has_failed) before.push_back(end.rank);
    if (is_named(end, failure)) named.push_back(end.rank);
  }
  return named.empty() ? before : named;
}

bool is_culprit_missing(const std::vector<protocol::RankExit>& exits, std::size_t num_ranks) {
  const protocol::RankExit* first = first_failure(exits);
  if (!first || !first->lost_peer || exits.size() >= num_ranks) return false;
  if (early_ends(exits, *first).empty()) return true;
  return first->lost_port != 0 && std::ranges::none_of(exits, [&](const protocol::RankExit& end) {
           return end.code == 0 && end.signal == 0 && (end.ports[0] == 0 || is_named(end, *first));
         });
}

Verdict judge_exit(const protocol::RankExit& end, const ExitEvidence& evidence) {
  Verdict verdict;
  job::Fatal& fatal = verdict.fatal;
  if (evidence.published) {
    fatal = *evidence.published;
    set_rank(fatal, fatal.rank, evidence.locations);
    verdict.exit_code = is_own_failure(fatal) ? end.exit_code() : base::exit_code(fatal.cause);
    const bool lacks_hint = fatal.cause == base::Cause::kResource && fatal.hint.empty();  // as from Python
    if (is_own_failure(fatal) || lacks_hint) add_remedy(fatal, evidence);
    return verdict;
  }
  if (!evidence.early_ends.empty() && end.lost_peer) return judge_early_end(end, evidence);
  fatal.cause = end.signal != 0 ? base::Cause::kRankDied : base::Cause::kRankExited;
  fatal.pid = end.pid;
  set_rank(fatal, end.rank, evidence.locations);
  fatal.detail = detail_for(end, evidence);
  fatal.hint = hint_for(end, evidence);
  const bool says_why = end.signal == 0 && fatal.detail != protocol::to_text(end);
  if (says_why || end.signal == SIGABRT) add_remedy(fatal, evidence);
  verdict.exit_code = end.exit_code();
  return verdict;
}

void add_step_and_operation(job::Fatal& fatal, const std::vector<base::telemetry::RankSnapshot>& ranks) {
  const auto snapshot = std::ranges::find(ranks, fatal.rank, &base::telemetry::RankSnapshot::rank);
  if (snapshot == ranks.end()) return;
  if (fatal.step < 0) fatal.step = snapshot->steps;
  if (!fatal.op.empty()) return;
  if (const auto* now = job::health::current_operation(*snapshot))
    fatal.op = job::health::operation_label(*now);
  else if (const auto* last = job::health::last_finished_operation(*snapshot))
    fatal.detail += "; the last operation that it finished was " + job::health::describe(*last);
}

void add_remedy(job::Fatal& fatal, const ExitEvidence& evidence) {
  const KnownError* known = remedy_for(fatal.detail, evidence);
  if (known && !find_known_error(fatal.detail, {*known})) {
    const std::string line = text_with(*known, evidence);
    fatal.detail += " (" + line.substr(std::min(line.find_first_not_of(" \t"), line.size())) + ")";
  }
  if (known)
    fatal.hint = known->remedy;
  else if (fatal.hint.empty() && is_own_failure(fatal) && !evidence.tail.empty())
    fatal.hint = kStderrHint;
}

bool is_own_failure(const job::Fatal& fatal) {
  return fatal.cause == base::Cause::kRankExited || fatal.cause == base::Cause::kRankDied;
}

bool is_victim_of_another(const job::Fatal& fatal) {
  return is_own_failure(fatal) && is_victim(job::first_of(fatal.detail));
}

void use_own_exit_code(Verdict& verdict, const std::vector<protocol::RankExit>& exits) {
  if (!is_own_failure(verdict.fatal)) return;
  for (const protocol::RankExit& end : exits) {
    if (end.rank != verdict.fatal.rank || !end.failed()) continue;
    const bool was_ending = verdict.fatal.cause == base::Cause::kRankExited && end.signal != 0;
    verdict.exit_code = was_ending ? base::exit_code(verdict.fatal.cause) : end.exit_code();
  }
}

std::string failure_report(const job::Fatal& fatal, const std::string& states, const std::string& tail) {
  return (fatal.cause == base::Cause::kPreempted ? "" : states) +
         (tail.empty()
              ? ""
              : "lockstep: the last lines that rank " + std::to_string(fatal.rank) + " wrote to stderr:\n" + tail);
}

std::string stack_location(const std::string& run_dir, int rank, const std::vector<protocol::RankLocation>& locations) {
  const bool several = std::ranges::any_of(
      locations, [&](const protocol::RankLocation& location) { return location.host != locations.front().host; });
  const bool known = rank >= 0 && static_cast<std::size_t>(rank) < locations.size();
  return run_dir + "/" + process::stack_file_name(rank) +
         (several && known ? " on " + locations[static_cast<std::size_t>(rank)].host : "");
}

void request_stack(Verdict& verdict, const std::vector<protocol::RankExit>& exits, const std::string& run_dir,
                   const std::vector<protocol::RankLocation>& locations) {
  const int rank = verdict.fatal.rank;
  const bool ended = std::ranges::find(exits, rank, &protocol::RankExit::rank) != exits.end();
  if (verdict.fatal.cause != base::Cause::kRankStuck || rank < 0 || ended || !verdict.stacks.empty()) return;
  verdict.stacks = {rank};
  verdict.fatal.hint = "its stack is in " + stack_location(run_dir, rank, locations) +
                       (verdict.fatal.hint.empty() ? "" : "; " + verdict.fatal.hint);
}

std::optional<job::Fatal> CauseOfExits::published() const {
  const auto line = store.find(job::key::kCause, base::Deadline::in(std::chrono::seconds(1)));
  return line ? job::parse_fatal(*line) : std::nullopt;
}

bool CauseOfExits::needs_exit_of_rank_that_left() const {
  const auto cause = published();
  if (!cause || !is_left_rank(*cause, cause->rank)) return false;
  return std::ranges::find(exits, cause->rank, &protocol::RankExit::rank) == exits.end();
}

bool CauseOfExits::is_known() const {
  const auto cause = published();
  return cause && !is_victim_of_another(*cause);
}

Verdict CauseOfExits::judge(const protocol::RankExit& end, std::optional<job::Fatal> cause) const {
  // A victim may have published its error, but a rank that has lost no peer, or that ended too early, explains it. An
  // error with the same words may also be the program's own: then the others have lost that rank.
  const bool has_lost_peer = end.lost_peer || end.code == base::exit_code(base::Cause::kPeerUnreachable);
  const bool explains = !has_lost_peer || (end.lost_port != 0 && !early_ends(exits, end).empty());
  if (cause && is_victim_of_another(*cause) && explains) cause.reset();
  const bool is_rank = cause && cause->rank >= 0 && cause->rank < static_cast<int>(locations.size());
  const int rank = is_rank ? cause->rank : end.rank;
  return judge_exit(end, {.tail = output.tail(rank),
                          .prefix = output.prefix(rank),
                          .published = std::move(cause),
                          .locations = locations,
                          .early_ends = early_ends(exits, end),
                          .own_errors = own_errors_or_none()});
}

void CauseOfExits::settle(Verdict& verdict, const std::vector<base::telemetry::RankSnapshot>& ranks) const {
  const auto replace = [&](const protocol::RankExit& end, std::optional<job::Fatal> cause) {
    std::string stacks = std::move(verdict.printed_stacks);
    verdict = judge(end, std::move(cause));
    verdict.printed_stacks = std::move(stacks);
    add_step_and_operation(verdict.fatal, ranks);
  };
  const protocol::RankExit* failure = first_failure(exits);
  const auto now = published();
  const bool was_replaced = now && is_own_failure(*now) && job::is_difference(verdict.fatal.cause);
  const bool was_restored = now && is_own_failure(verdict.fatal) && job::is_difference(now->cause);
  if (failure && (was_replaced || was_restored)) replace(*failure, now);
  // A rank that exits with an error leaves its world as one that has finished does.
  for (const protocol::RankExit& end : exits) {
    const bool is_own_exit = end.failed() && end.signal == 0 && !end.after_stop && !end.lost_peer &&
                             end.code != base::exit_code(base::Cause::kUnevenInput) &&
                             end.code != base::exit_code(base::Cause::kPeerUnreachable);
    if (now && is_left_rank(*now, end.rank) && is_own_exit && verdict.fatal.cause == now->cause)
      replace(end, std::nullopt);
  }
  use_own_exit_code(verdict, exits);
}

}  // namespace lockstep::launcher::supervise
