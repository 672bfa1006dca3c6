// The processes of the ranks of this host: signals to them, and what they leave behind.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/launch/agent/rank_monitor.h"

namespace lockstep::launcher::agent {

struct RankProcess {
  int rank = -1;
  pid_t pid = -1;  ///< -1: not started, or reaped
  RankMonitor monitor;
  pid_t session = -1;       ///< its session and process group: the pid, also after its end
  int deferred_signal = 0;  ///< what it has started gets this signal when it has ended; 0: none
  bool succeeded = false;   ///< it has exited in good order
};

/// Sends SIGUSR1 or SIGUSR2 to the ranks that expect it. See process::signal_first_expecting().
void forward_signal(const std::vector<RankProcess>& ranks, int signal);

/// Sends a signal that asks to stop to the running ranks, without those in their world unless `also_in_world`. If the
/// program of a rank handles it (see process::signal_programs()), what the program has started gets it only when the
/// rank has ended, because the program may need its workers and other helpers to save. Otherwise the whole process
/// group gets it.
void signal_ranks(std::vector<RankProcess>& ranks, int signal, bool also_in_world);

/// Returns the running children of this process that ranks which have succeeded left behind, as "4711 (curl), 4712
/// (tee)", the first eight of each rank. Call it when all ranks have ended: this process has inherited their children.
/// A child that has called setsid() is assigned by the variable LOCKSTEP_RANK in its environment; without it, to no
/// rank.
std::map<int, std::string> find_left_behind(const std::vector<RankProcess>& ranks);

}  // namespace lockstep::launcher::agent
