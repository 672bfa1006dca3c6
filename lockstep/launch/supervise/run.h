// `lockstep run`: the life of one job, seen from where the person is.
#pragma once

#include <string>
#include <vector>

#include "lockstep/job/fatal.h"
#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher {

/// Starts the ranks, shows what they print, and returns when no process of the job is left: 0 when all ranks returned
/// 0, else the code that the FATAL line, which is printed last, stands for. Call it from the main thread before others
/// exist; it takes over signal handling. Throws Error before anything was started, for what is not allowed.
int run(RunOptions options);

/// The path of the program `name`, as a shell here finds it; other hosts get the same. What is not to run here need not
/// be here. Throws UsageError.
std::string resolve_program(const HostOptions& options, const std::string& name);

/// The signals that a person stops us with, without those that whoever started us has switched off (nohup), and
/// SIGCHLD, SIGUSR1 and SIGUSR2.
std::vector<int> handled_signals();

/// The FATAL line of an error that stopped the launcher itself.
job::Fatal to_fatal(const base::Error& error);

}  // namespace lockstep::launcher
