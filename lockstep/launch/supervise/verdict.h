// The verdict on a failed job: one cause out of everything that was observed, and the launcher's exit code for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher {

struct Verdict {
  job::Fatal fatal;
  int exit_code = 70;
  std::vector<int> stacks{};  ///< ranks whose stacks are written to files
};

/// Returns the exit that caused the others, from all exits so far in the order of their arrival; null if none is a
/// failure. A death by a signal outranks an exit code and SIGABRT, because a rank that loses a peer exits or aborts,
/// and its exit may arrive first. Pure.
const RankExit* first_failure(const std::vector<RankExit>& exits);

/// What is known besides the exits.
struct ExitEvidence {
  std::string tail;                     ///< the last lines of the rank's stderr, as printed above the FATAL line
  std::string prefix;                   ///< the prefix of each of these lines
  std::optional<job::Fatal> published;  ///< the cause that a rank has published in the store
  std::vector<RankLocation> locations;
};

/// Returns the verdict on a job in which `end` was the first failure. A published cause explains more than the exit of
/// a process, so it takes precedence. Pure.
Verdict judge_exit(const RankExit& end, const ExitEvidence& evidence);

/// Sets the step and the operation of the rank in `fatal`, unless they are set. Pure.
void add_step_and_operation(job::Fatal& fatal, const std::vector<base::RankSnapshot>& ranks);

/// Requests the stack of a rank that is alive and that other ranks reported as kRankStuck. `exits`: of the ranks that
/// have ended. Pure.
void request_stack(Verdict& verdict, const std::vector<RankExit>& exits, const std::string& run_dir,
                   const std::vector<RankLocation>& locations);

/// Returns the path of the stack file of `rank`, with the host if the ranks are on several hosts. Pure.
std::string stack_location(const std::string& run_dir, int rank, const std::vector<RankLocation>& locations);

}  // namespace lockstep::launcher
