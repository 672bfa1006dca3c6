// Why a run ended: one cause out of all that was seen, and the code that the launcher returns for it.
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
  std::vector<int> stacks{};  ///< ranks whose stacks tell more
};

/// The end that is the cause of the others, from all ends so far in the order in which they were seen; null when none
/// has failed. A death by a signal outranks an exit code and SIGABRT, because a rank that loses its peer exits or
/// aborts, and may be seen first. Pure.
const RankExit* first_failure(const std::vector<RankExit>& exits);

/// What is known besides how the ranks ended.
struct ExitEvidence {
  std::string tail;                     ///< of the rank's stderr, as it stands above the line
  std::string prefix;                   ///< in front of each of its lines
  std::optional<job::Fatal> published;  ///< the cause that a rank left in the store
  std::vector<RankLocation> locations;  ///< of the ranks
};

/// The verdict on a run in which `end` failed first. A cause that a rank has published explains more than how its
/// process ended, so it is preferred. Pure.
Verdict judge_exit(const RankExit& end, const ExitEvidence& evidence);

/// Adds to `fatal` the step and the operation that its rank was in, where it has none. Pure.
void add_step_and_operation(job::Fatal& fatal, const std::vector<base::RankSnapshot>& ranks);

/// A rank that others have waited for too long, as they say themselves, and that lives: its stack tells more. `ends`:
/// of those that have ended. Pure.
void request_stack(Verdict& verdict, const std::vector<RankExit>& exits, const std::string& run_dir,
                   const std::vector<RankLocation>& locations);

/// Where the stack of `rank` is written, with its host when ranks are on several. Pure.
std::string stack_location(const std::string& run_dir, int rank, const std::vector<RankLocation>& locations);

}  // namespace lockstep::launcher
