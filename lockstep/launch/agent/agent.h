// The agent process of one host: starts the host's ranks, monitors them from outside, passes their output to the
// launcher, and ends them when the launcher asks for it or is gone.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher {

/// The command `lockstep agent`: reads a JobPlan from stdin, starts its ranks and returns when no process of the job is
/// left, at most 5 s after the SIGKILL that ends it. Writes the frames of frames.h to stdout. At the end of stdin the
/// launcher is gone, and all processes of the job get SIGKILL at once. Single-threaded and not dumpable. With
/// options.guarded there is no launcher on this host that could clean up after a dead agent, so a parent process of the
/// agent does. Returns the exit code.
int agent_main(const AgentOptions& options);

}  // namespace lockstep::launcher
