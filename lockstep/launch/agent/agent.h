// The agent process of one host: starts the host's ranks, monitors them, forwards their output to the launcher, and
// ends them when the launcher requests it or has ended.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::agent {

/// The command `lockstep agent`: reads a JobPlan from stdin, starts its ranks, and blocks until no process of the job
/// is left, or until 5 s after it has sent them SIGKILL. Writes the frames of frames.h to stdout. The end of stdin
/// means that the launcher has ended: the agent then sends SIGKILL to all processes of the job at once. Writes errors
/// to stderr. Returns the exit code.
///
/// The agent is single-threaded and not dumpable. Set options.guarded on a host without a launcher: the agent then runs
/// as a child of a guard process, which kills the processes of the job if the agent dies.
int agent_main(const cli::AgentOptions& options);

}  // namespace lockstep::launcher::agent
