// What a process does with a signal, according to /proc.
#pragma once

#include <sys/types.h>

#include <vector>

namespace lockstep::launcher::process {

/// Returns whether the process has a handler for the signal.
bool catches_signal(pid_t pid, int signal);

/// Sends SIGUSR1 or SIGUSR2 to the first process of each tree, a shell and what it has started, that expects it. None
/// may. A process expects the signal if it has a handler, or keeps it blocked in its main thread, as for signalfd(2),
/// or sigwait(3) in another thread; it would end any other process that does not ignore it. Blocks for 0.2 s if one of
/// the processes has blocked it.
void signal_first_expecting(const std::vector<std::vector<pid_t>>& trees, int signal);

}  // namespace lockstep::launcher::process
