// The process between the launcher and the ranks of one host: it starts them, watches them from outside, passes on what
// they write, and ends them when the launcher says so, or is gone.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher {

/// The whole life of `lockstep agent`: reads a JobPlan from stdin, starts its ranks and exits when no process of the
/// job is left, at the latest 5 s after the SIGKILL that ends it. The end of stdin means that the launcher is gone:
/// then all processes of the job get SIGKILL at once. Frames of wire.h on stdout. Single-threaded, and not dumpable.
/// With options.guarded no launcher of this host is above it to end what is left when it dies, so a process of its own
/// is. Returns the exit code.
int agent_main(const AgentOptions& options);

}  // namespace lockstep::launcher
