// The launcher's part while ranks run: it passes on their output, finds out who failed first, and brings all down together.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/job/pulse.h"
#include "lockstep/launch/agent_link.h"
#include "lockstep/launch/options.h"
#include "lockstep/launch/plan.h"

namespace lockstep::launcher {

/// Gives each agent its job and stays until no process of it is left. `agents` and `nodes` belong together. `surroundings.store.host` is where the store is to listen; job, key and port are
/// made here. `signals` of signal_descriptor(), those of a person, SIGCHLD, SIGUSR1 and SIGUSR2; `not_ours`: processes below this one that were there before it. Returns the exit code.
int supervise(const RunOptions& options, Surroundings surroundings, std::vector<AgentLink> agents, std::vector<Node> nodes, base::Fd signals, std::vector<pid_t> not_ours);

/// For how long an agent may tell nothing; 0: for ever.
std::chrono::milliseconds silence_of_agents(const job::PulseLimits& limits);

}  // namespace lockstep::launcher
