// Signals and children of this process: reads signals, reaps children, and finds and kills what they leave behind.
#pragma once

#include <sys/types.h>

#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher::process {

/// Makes this process the parent of all its descendants that become orphans after this call.
void become_subreaper();

/// Returns the signals that `lockstep run` handles: SIGCHLD, SIGUSR1, SIGUSR2, and SIGINT, SIGQUIT, SIGTERM and SIGHUP,
/// except those that this process ignores (nohup makes it ignore SIGHUP).
std::vector<int> handled_signals();

/// Blocks all signals except those of faults, and returns a descriptor that delivers `signals`. Call it before any
/// thread is started. Throws SystemError.
base::Fd make_signal_fd(const std::vector<int>& signals);
/// Reads the next pending signal from that descriptor. Does not block; returns nullopt if there is none.
std::optional<int> read_signal(int fd);

struct ReapedChild {
  pid_t pid = 0;  ///< 0: there are children, but none has ended
  int status = 0;
};
/// Reaps one child that has ended. Does not block. Returns nullopt if there are no children at all.
std::optional<ReapedChild> try_reap();

/// Opens /dev/null for each closed descriptor among 0, 1 and 2, so that no other file gets these numbers.
void open_standard_descriptors();

/// Returns whether this process has a child, including one that has ended.
bool has_children();

/// Throws UsageError if /proc does not show the processes of this PID namespace: pids that are read there would be
/// those of other processes here.
void check_proc();

/// Returns the current descendants of this process according to /proc, including zombies.
std::vector<pid_t> descendants();

/// Sends SIGKILL to all descendants except `spared` and their descendants, and reaps them. Repeats this until none is
/// left or the deadline expires. Returns the processes that are left.
std::vector<pid_t> kill_descendants(const std::vector<pid_t>& spared, base::Deadline deadline);

}  // namespace lockstep::launcher::process
