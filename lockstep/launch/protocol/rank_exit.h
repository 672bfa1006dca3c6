// How the process of a rank ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/job/exit_record.h"

namespace lockstep::launcher::protocol {

inline constexpr std::size_t kMaxErrorMessageBytes = 4096;

/// The host and the process of a rank.
struct RankLocation {
  std::string host;
  std::int64_t pid = -1;  ///< -1: not started yet
};

/// The exit of a rank's process. It also describes the exit of an agent, ssh or srun; `rank` is then -1.
struct RankExit {
  int rank = -1;
  std::int64_t pid = -1;
  int code = 0;                ///< exit code if signal is 0
  int signal = 0;              ///< the signal that ended it; 0: it exited
  std::int64_t oom_kills = 0;  ///< if SIGKILL ended the rank: out-of-memory kills in the agent's cgroup since its start
  std::string message{};       ///< what it wrote to its error file before it failed; at most kMaxErrorMessageBytes
  std::array<std::int64_t, 64> ports{};  ///< RankPage::tcp_ports
  int lost_port = 0;                     ///< of the peer that its error names; 0: none; set by the launcher, not sent
  bool lost_peer = false;   ///< its last lines say only that another process has ended; set by the launcher, not sent
  bool after_stop = false;  ///< the job's ranks had been sent a signal to stop; set by the launcher, not sent
  bool preempted = false;   ///< it stopped in good order after a stop request; set by the launcher, not sent

  bool failed() const { return !preempted && (code != 0 || signal != 0); }
  /// Returns the exit code as a shell reports it: the code, or 128 + the signal.
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
  job::ExitRecord record() const {
    return signal != 0 ? job::ExitRecord{job::ExitKind::kSignal, signal} : job::ExitRecord{job::ExitKind::kCode, code};
  }
};

/// Returns "exited with code 7" or "killed by SIGKILL".
inline std::string to_text(const RankExit& end) { return job::describe(end.record()); }

}  // namespace lockstep::launcher::protocol
