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
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher {

/// A job whose hosts are there, and have met.
struct PreparedJob {
  LaunchContext context;  ///< store.host is where the store is to listen; key and port are made by supervise()
  std::vector<AgentLink> agents;
  std::vector<Node> nodes;  ///< of each agent
  std::string start_note;   ///< a line about it; empty: none
};

/// How it has ended: nothing of it is left, but on hosts out of sight.
struct JobOutcome {
  std::optional<Verdict> verdict;   ///< none: all ranks returned 0
  bool is_stopped = false;          ///< a person has asked for it, before or after that
  bool preempted_too_late = false;  ///< somebody has asked the ranks to leave (SIGUSR1) when they were ending already
  Attempt attempt;
  std::set<std::size_t> lost;         ///< numbers of hosts that failed themselves
  bool has_unreachable_host = false;  ///< of what runs on one of them it is only known that it ends within 10 s
  std::string failure_report;         ///< lines: where the ranks were, and what the one at fault wrote
  std::unique_ptr<Output> output;     ///< to be finished; null: it never began
};

/// Gives each agent its job and stays until no process of it is left. `signals` of make_signal_fd(), those of a
/// person, SIGCHLD, SIGUSR1 and SIGUSR2; `inherited_children`: processes below this one that were there before it.
JobOutcome supervise(const RunOptions& options, PreparedJob start, int signals,
                     const std::vector<pid_t>& inherited_children);

/// For how long an agent may tell nothing; 0: for ever.
std::chrono::milliseconds agent_silence_limit(const job::HealthLimits& limits);

}  // namespace lockstep::launcher
