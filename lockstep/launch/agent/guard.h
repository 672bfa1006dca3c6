// The guard of an agent on another host: kills the processes that the agent leaves behind.
#pragma once

namespace lockstep::launcher::agent {

/// Forks. Returns in the child, which is the agent. The parent remains as its guard: when the agent ends, the guard
/// kills all processes that the agent has started, and exits with the agent's exit code. The guard ignores signals that
/// SLURM sends to all processes before it ends a job; the ranks handle them. Throws SystemError if fork() fails.
void fork_guarded_agent();

}  // namespace lockstep::launcher::agent
