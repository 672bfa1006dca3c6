// What a process does with a signal, according to /proc.
#pragma once

#include <sys/types.h>

#include <map>
#include <vector>

#include "lockstep/launch/process/activity.h"

namespace lockstep::launcher::process {

/// Returns whether the process has a handler for the signal.
bool catches_signal(pid_t pid, int signal);

/// Sends SIGUSR1 or SIGUSR2 to the first process of each tree, a shell and what it has started, that expects it. None
/// may. A process expects the signal if it has a handler, or keeps it blocked in its main thread, as for signalfd(2),
/// or sigwait(3) in another thread; it would end any other process that does not ignore it. Blocks for 0.2 s if one of
/// the processes has blocked it.
void signal_first_expecting(const std::vector<std::vector<pid_t>>& trees, int signal);

/// Two processes of a rank.
struct RankPids {
  pid_t started = -1;  ///< by the agent
  pid_t joined = -1;   ///< the one that is in the world, `started` or a descendant; -1: not known
};

/// Sends the signal to the program of each rank that expects it, and to nothing that the program has started. The
/// program is the process that has joined the world; if that is not known, the processes that are not shells and were
/// started by the agent or by shells alone, all of which must expect it. Processes above the program that expect the
/// signal, such as a shell with a trap, get it as well. Returns for each rank whether its program expects the signal;
/// if not, no process of the rank gets it. Blocks for 0.2 s if one of these processes has blocked it.
std::vector<bool> signal_programs(const std::vector<RankPids>& ranks, const std::map<pid_t, ProcessCounters>& processes,
                                  int signal);

}  // namespace lockstep::launcher::process
