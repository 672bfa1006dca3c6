// The launcher's part while ranks run: it passes on their output, finds out who failed first, and brings all down
// together.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/job/health/rank_health.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher {

/// A job whose hosts are there, and have met.
struct Start {
  Surroundings surroundings;  ///< store.host is where the store is to listen; key and port are made by supervise()
  std::vector<AgentLink> agents;
  std::vector<Node> nodes;  ///< of each agent
  std::string opening;      ///< a line about it; empty: none
};

/// How it has ended: nothing of it is left, but on hosts out of sight.
struct Ended {
  std::optional<Verdict> verdict;  ///< none: all ranks returned 0
  bool stopped = false;            ///< a person has asked for it, before or after that
  bool asked_too_late = false;     ///< somebody has asked the ranks to leave (SIGUSR1) when they were ending already
  Attempt attempt;
  std::set<std::size_t> lost;      ///< numbers of hosts that failed themselves
  bool out_of_sight = false;       ///< of what runs on one of them it is only known that it ends within 10 s
  std::string last_words;          ///< lines: where the ranks were, and what the one at fault wrote
  std::unique_ptr<Output> output;  ///< to be finished; null: it never began
};

/// Gives each agent its job and stays until no process of it is left. `signals` of signal_descriptor(), those of a
/// person, SIGCHLD, SIGUSR1 and SIGUSR2; `not_ours`: processes below this one that were there before it.
Ended supervise(const RunOptions& options, Start start, int signals, const std::vector<pid_t>& not_ours);

/// For how long an agent may tell nothing; 0: for ever.
std::chrono::milliseconds silence_of_agents(const job::PulseLimits& limits);

}  // namespace lockstep::launcher
