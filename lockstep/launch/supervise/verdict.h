// Determines the verdict on a failed job: one cause from all observations, and the launcher's exit code for it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/protocol/rank_exit.h"
#include "lockstep/launch/supervise/error_texts.h"

namespace lockstep::launcher::supervise {

/// The content of the FATAL line, and the exit code of the launcher.
struct Verdict {
  job::Fatal fatal;
  int exit_code = 70;
  std::vector<int> stacks{};     ///< ranks whose stacks the agents must write to files
  std::string printed_stacks{};  ///< those for which there is no file; printed above the FATAL line
  bool is_silent = false;        ///< print no FATAL line
};

/// Returns the verdict with the exit code of the cause.
Verdict verdict_on(job::Fatal fatal);

/// Sets the rank of `fatal`, and its host and pid unless they are set. Pure.
void set_rank(job::Fatal& fatal, int rank, const std::vector<protocol::RankLocation>& locations);

/// Returns the exit that caused the others; null if none is a failure. `exits` has all exits so far in the order of
/// their arrival. A rank killed by a signal other than SIGABRT takes precedence over earlier exits, because a rank that
/// loses a peer exits or aborts, and its exit may arrive first; one whose last lines say that it has lost a peer gives
/// precedence to any other. Pure.
const protocol::RankExit* first_failure(const std::vector<protocol::RankExit>& exits);

/// Sets lost_peer and lost_port of `end` from the last lines of its stderr. Pure.
void add_lost_peer(protocol::RankExit& end, const std::string& tail, const std::string& prefix);

/// Returns the ranks that have ended with exit code 0 although `failure` needed one of them: the one that its error
/// names, or else all that had ended before it. Pure.
std::vector<int> early_ends(const std::vector<protocol::RankExit>& exits, const protocol::RankExit& failure);

/// Returns whether all failures so far are of ranks that have lost a peer, and that peer may still be ending: Python
/// first frees what it holds. Pure.
bool is_culprit_missing(const std::vector<protocol::RankExit>& exits, std::size_t num_ranks);

/// The facts for a verdict besides the exits.
struct ExitEvidence {
  std::string tail;                     ///< the last lines of the rank's stderr, as printed above the FATAL line
  std::string prefix;                   ///< the prefix of each of these lines
  std::optional<job::Fatal> published;  ///< the cause that a rank has published in the store
  std::vector<protocol::RankLocation> locations;
  std::vector<int> early_ends{};         ///< early_ends() of this failure
  std::vector<KnownError> own_errors{};  ///< rows of the user's table, before those of known_errors()
};

/// Adds to a verdict on an exception the remedy for it, and the line of the evidence that says it unless the detail
/// does. Pure.
void add_remedy(job::Fatal& fatal, const ExitEvidence& evidence);

/// Returns whether the cause is that a rank has exited or died by itself. Pure.
bool is_own_failure(const job::Fatal& fatal);

/// Returns whether such a cause says only that another process has ended. Pure.
bool is_victim_of_another(const job::Fatal& fatal);

/// Returns the verdict on a job in which `end` was the first failure. A published cause takes precedence, because it
/// explains more than the exit of a process; the rest of the evidence is then that of its rank. The exception of a
/// program has the remedy for it as its hint, whether it was published, printed or written to an error file. Without
/// one, as in a program that does not use Lockstep: if the rank has lost a connection and another rank had ended too
/// early, that rank is at fault (kUnevenInput); if it is one of several, the detail lists them. Pure.
Verdict judge_exit(const protocol::RankExit& end, const ExitEvidence& evidence);

/// Sets the step and the operation in `fatal` from the snapshot of its rank, unless they are set. If the rank is in no
/// operation, appends the last one that it finished to the detail. Pure.
void add_step_and_operation(job::Fatal& fatal, const std::vector<base::telemetry::RankSnapshot>& ranks);

/// Adds the rank of the verdict to `verdict.stacks`, and the stack file to the hint, if other ranks have reported the
/// rank as kRankStuck and it is alive: `exits` does not contain it. Pure.
void request_stack(Verdict& verdict, const std::vector<protocol::RankExit>& exits, const std::string& run_dir,
                   const std::vector<protocol::RankLocation>& locations);

/// Sets the exit code of a verdict on a rank that died or exited to that of its exit in `exits`. The verdict may be
/// older: the rank may have published its cause first, and other ranks may have exited before it; if it has been killed
/// since it raised an exception, the code is the one that it would have ended with. Pure.
void use_own_exit_code(Verdict& verdict, const std::vector<protocol::RankExit>& exits);

/// Returns what is printed above the FATAL line: where the ranks were (`states`), and the last lines of stderr of the
/// rank that failed (`tail`). Pure.
std::string failure_report(const job::Fatal& fatal, const std::string& states, const std::string& tail);

/// Returns the path of the stack file of `rank`, with the host if the ranks are on several hosts. Pure.
std::string stack_location(const std::string& run_dir, int rank, const std::vector<protocol::RankLocation>& locations);

/// The verdict on ranks that have ended: what they have published, and what they have printed.
struct CauseOfExits {
  job::Store& store;
  const output::Output& output;
  const std::vector<protocol::RankLocation>& locations;
  const std::vector<protocol::RankExit>& exits;  ///< so far, in the order of their arrival

  /// Returns the cause that a rank has published, if there is one.
  std::optional<job::Fatal> published() const;
  /// Returns whether there is one that says more than that another process has ended.
  bool is_known() const;
  /// Returns whether another rank has published kUnevenInput about a rank that has not ended yet: its exit code tells
  /// whether it had finished.
  bool needs_exit_of_rank_that_left() const;
  /// Returns the verdict on a job in which `end` was the first failure. See judge_exit().
  Verdict judge(const protocol::RankExit& end) const { return judge(end, published()); }
  Verdict judge(const protocol::RankExit& end, std::optional<job::Fatal> cause) const;
  /// Completes `verdict` when all ranks have ended: ranks may have published since what led to the cause
  /// (job::replace_cause()), and exit codes are known.
  void settle(Verdict& verdict, const std::vector<base::telemetry::RankSnapshot>& ranks) const;
};

}  // namespace lockstep::launcher::supervise
