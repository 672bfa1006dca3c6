// Verdicts on jobs that hang: all ranks are alive, but none makes progress or one has no heartbeat.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/health/straggler_detector.h"
#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher::supervise {

/// The facts for a verdict besides the ranks without progress.
struct HangEvidence {
  job::health::HealthLimits limits;
  std::string run_dir;  ///< where stack files are written
  std::vector<protocol::RankLocation> locations;
  std::vector<KnownError> own_errors{};  ///< as in ExitEvidence
};

/// Returns the verdict on ranks that are stalled or stuck, from the snapshots of all ranks. A rank that waits while it
/// handles an exception has failed (kRankExited): its clean-up makes a call that the others do not make. Pure.
Verdict judge_hang(const job::health::HangFinding& finding, const std::map<int, job::health::RankHealth>& health,
                   const std::vector<base::telemetry::RankSnapshot>& ranks, const HangEvidence& evidence);

/// Adds where the main thread of `rank` is, if the verdict is about that rank.
void add_python_location(Verdict& verdict, int rank, const std::string& location);

/// Adds the stacks of `rank`, for which no file could be written: `text` has the reason in its first line.
void add_stacks(Verdict& verdict, int rank, const std::string& text);

/// Returns a kRankStalled warning about a rank that may still recover. Pure.
job::Fatal stall_warning(const job::health::RankHealth& health, const std::vector<protocol::RankLocation>& locations,
                         const job::health::HealthLimits& limits);
/// Returns the warning about a rank for which the others wait in every step. Pure.
job::Fatal straggler_warning(const job::health::Straggler& straggler,
                             const std::map<int, job::health::RankHealth>& health,
                             const std::vector<protocol::RankLocation>& locations);

}  // namespace lockstep::launcher::supervise
