// What a process does with a signal, according to /proc.
#pragma once

#include <sys/types.h>

#include <vector>

namespace lockstep::launcher::process {

/// Returns whether the process has a handler for the signal.
bool catches_signal(pid_t pid, int signal);

/// Returns whether the process has a handler for the signal, or has blocked it, as for sigwait(3) and signalfd(2). It
/// would end any other process that does not ignore it. Blocks for 40 ms if the process has blocked it.
bool expects_signal(pid_t pid, int signal);

/// Sends SIGUSR1 or SIGUSR2 to the first of `pids`, a shell and what it has started, that expects it. None may. Blocks
/// for 40 ms for each that has blocked it.
void signal_first_expecting(const std::vector<pid_t>& pids, int signal);

}  // namespace lockstep::launcher::process
