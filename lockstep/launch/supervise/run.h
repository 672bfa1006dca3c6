// The command `lockstep run`: runs one job, with its restarts.
#pragma once

#include <string>
#include <vector>

#include "lockstep/job/fatal.h"
#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher {

/// Starts the ranks, prints their output and blocks until no process of the job is left. Returns 0 if all ranks
/// returned 0. Otherwise prints a FATAL line last and returns the exit code of its cause. Call it from the main thread
/// before other threads exist; it takes over signal handling. If the request is invalid, throws Error before any rank
/// has started.
int run(RunOptions options);

/// Returns the path of the program `name` as a shell on this host would find it; all hosts use the same path. A path
/// need not exist on this host if no rank runs here. Throws UsageError.
std::string resolve_program(const HostOptions& options, const std::string& name);

/// Returns the signals that `lockstep run` handles: SIGCHLD, SIGUSR1, SIGUSR2, and SIGINT, SIGTERM and SIGHUP, except
/// those that this process ignores (nohup makes it ignore SIGHUP).
std::vector<int> handled_signals();

/// Returns the FATAL line's fields for an error that stopped the launcher itself.
job::Fatal to_fatal(const base::Error& error);

}  // namespace lockstep::launcher
