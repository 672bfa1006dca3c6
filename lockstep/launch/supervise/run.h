// The command `lockstep run`: runs one job from the launcher's side.
#pragma once

#include <string>
#include <vector>

#include "lockstep/job/fatal.h"
#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher {

/// Starts the ranks, prints their output and blocks until no process of the job is left. Returns 0 if all ranks
/// returned 0, else the exit code that belongs to the FATAL line, which is printed last. Call it from the main thread
/// before other threads exist; it takes over signal handling. Throws Error before any rank has started if the request
/// is invalid.
int run(RunOptions options);

/// Returns the path of the program `name` as a shell on this host would find it; other hosts get the same path. If the
/// program does not run on this host, it need not exist here. Throws UsageError.
std::string resolve_program(const HostOptions& options, const std::string& name);

/// The signals that a user stops lockstep with, except those that its parent has set to be ignored (nohup), and
/// SIGCHLD, SIGUSR1 and SIGUSR2.
std::vector<int> handled_signals();

/// The content of the FATAL line for an error that stopped the launcher itself.
job::Fatal to_fatal(const base::Error& error);

}  // namespace lockstep::launcher
