// Why a run ended whose ranks live: none of them gets on, or one shows no sign of life.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher {

/// What is known besides the ranks that do not get on.
struct HangEvidence {
  job::HealthLimits limits;
  std::string run_dir;                  ///< where stacks go
  std::vector<RankLocation> locations;  ///< of the ranks
};

/// The verdict on ranks that are silent or stuck, by what all had done. Pure.
Verdict judge_hang(const job::HangFinding& finding, const std::map<int, job::RankHealth>& health,
                   const std::vector<base::RankSnapshot>& ranks, const HangEvidence& evidence);

/// kRankStalled of a rank that may yet go on, for a warning. Pure.
job::Fatal stall_warning(const job::RankHealth& pulse, const std::vector<RankLocation>& locations,
                         const job::HealthLimits& limits);

}  // namespace lockstep::launcher
