// The command `lockstep run`: runs one job, with its restarts.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::supervise {

/// Starts the ranks, prints their output and blocks until no process of the job is left. Returns 0 if all ranks
/// returned 0. Otherwise prints a FATAL line last and returns the exit code of its cause. Call it from the main thread
/// before other threads exist; it takes over signal handling. If the request is invalid, throws Error before any rank
/// has started.
int run(cli::RunOptions options);

}  // namespace lockstep::launcher::supervise
