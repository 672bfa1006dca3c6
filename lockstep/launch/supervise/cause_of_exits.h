// The verdict on ranks that have ended: what they have published, and what they have printed.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/store.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/protocol/rank_exit.h"
#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher::supervise {

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
  Verdict judge(const protocol::RankExit& end) const;
  Verdict judge(const protocol::RankExit& end, std::optional<job::Fatal> cause) const;
  /// Completes `verdict` when all ranks have ended: ranks may have published since what led to the cause
  /// (job::replace_cause()), and exit codes are known.
  void settle(Verdict& verdict, const std::vector<base::telemetry::RankSnapshot>& ranks) const;
};

}  // namespace lockstep::launcher::supervise
