// `lockstep run`: the life of one job, seen from where the person is.
#pragma once

#include "lockstep/job/fatal.h"
#include "lockstep/launch/options.h"

namespace lockstep::launcher {

/// Starts the ranks, shows what they print, and returns when no process of the job is left: 0 when all ranks returned 0,
/// else the code that the FATAL line, which is printed last, stands for. Call it from the main thread before others exist;
/// it takes over signal handling. Throws Error before anything was started, for what is not allowed.
int run(RunOptions options);

/// The FATAL line of an error that stopped the launcher itself.
job::Fatal fatal_of(const base::Error& error);

}  // namespace lockstep::launcher
