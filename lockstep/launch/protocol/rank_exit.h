// How the process of a rank ended.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::launcher {

/// Where a rank runs.
struct RankLocation {
  std::string host;
  std::int64_t pid = -1;  ///< -1: not started yet
};

struct RankExit {
  int rank = -1;
  std::int64_t pid = -1;
  int code = 0;                ///< exit code, when signal is 0
  int signal = 0;              ///< the signal that ended it; 0: it exited
  std::int64_t oom_kills = 0;  ///< that the kernel has counted on its host, in the agent's cgroup, since the start; of
                               ///< a rank that SIGKILL has ended
  bool preempted = false;      ///< it has left its world in good order, to be started again

  bool failed() const { return !preempted && (code != 0 || signal != 0); }
  /// As a shell says it: the code, or 128 + signal.
  int exit_code() const { return signal != 0 ? 128 + signal : code; }
};

/// "exited with code 7", "killed by SIGKILL".
std::string to_text(const RankExit& end);

/// "SIGKILL"; "signal 40" for one without a name.
std::string signal_name(int signal);

}  // namespace lockstep::launcher
