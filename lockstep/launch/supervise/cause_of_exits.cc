#include "lockstep/launch/supervise/cause_of_exits.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/cause.h"

namespace lockstep::launcher::supervise {
namespace {

/// Whether another rank has published that this one had left.
bool is_left_rank(const job::Fatal& cause, int rank) {
  return cause.cause == base::Cause::kUnevenInput && cause.pid < 0 && cause.rank == rank;
}

}  // namespace

std::optional<job::Fatal> CauseOfExits::published() const {
  const auto line = store.find(job::key::kCause, base::Deadline::in(std::chrono::seconds(1)));
  return line ? job::parse_fatal(*line) : std::nullopt;
}

bool CauseOfExits::needs_exit_of_rank_that_left() const {
  const auto cause = published();
  if (!cause || !is_left_rank(*cause, cause->rank)) return false;
  return std::none_of(exits.begin(), exits.end(), [&](const auto& end) { return end.rank == cause->rank; });
}

bool CauseOfExits::is_known() const {
  const auto cause = published();
  return cause && !is_victim_of_another(*cause);
}

Verdict CauseOfExits::judge(const protocol::RankExit& end) const { return judge(end, published()); }

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
