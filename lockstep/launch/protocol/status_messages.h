// What an agent or a launcher reports about the ranks of its job to `lockstep status`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/launch/plan/job_plan.h"

namespace lockstep::launcher::protocol {

enum class RankState : std::uint8_t {
  kRunning,
  kStopped,  ///< by a signal or a debugger
  kExited,
  kUnknown,  ///< the agent of its host has not replied
};

/// A rank of any program. Its process is the one that called init(), or else the one that was started.
struct RankStatus {
  int rank = 0;
  std::string host;
  RankState state = RankState::kUnknown;
  std::int64_t pid = 0;              ///< 0: exited or unknown
  std::optional<int> cpu_percent{};  ///< of one core, since an earlier sample
  std::uint64_t resident_bytes = 0;  ///< including shared memory that the process has touched; 0: exited or unknown
  std::optional<base::telemetry::RankSnapshot> page{};  ///< nullopt: init() has not returned in this rank
};

/// The ranks of a job: of all hosts if the launcher reports them, of one host if an agent does.
struct JobStatus {
  plan::JobLabel label;
  bool is_whole = false;  ///< reported by the launcher
  std::vector<RankStatus> ranks;
};

// Each function decode_X() throws Error kProtocol for anything that encode_X() does not write.

std::string encode_rank_status(const RankStatus& rank);
RankStatus decode_rank_status(std::string_view bytes);

std::string encode_job_status(const JobStatus& job);
JobStatus decode_job_status(std::string_view bytes);

}  // namespace lockstep::launcher::protocol
