// The launcher's side of one generation: passes on the output of the ranks, determines which rank failed first, and
// stops all ranks together.
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

/// A job whose agents run and whose hosts reach each other.
struct PreparedJob {
  LaunchContext context;  ///< store.host is the address to listen on; supervise() sets key and port
  std::vector<AgentLink> agents;
  std::vector<Node> nodes;  ///< one per agent
  std::string start_note;   ///< a line to print at the start; empty: none
};

/// How a generation ended. None of its processes is left, except on unreachable hosts.
struct JobOutcome {
  std::optional<Verdict> verdict;   ///< none: all ranks returned 0
  bool is_stopped = false;          ///< a user has stopped the job, before or after the verdict
  bool preempted_too_late = false;  ///< SIGUSR1 arrived when the ranks were already ending
  Attempt attempt;
  std::set<std::size_t> lost_hosts;   ///< numbers of hosts that failed themselves
  bool has_unreachable_host = false;  ///< some host is unreachable; its processes end within 10 s
  std::string failure_report;      ///< lines to print: where the ranks were, and the last stderr lines of the culprit
  std::unique_ptr<Output> output;  ///< the caller calls finish(); null: no output was created
};

/// Sends each agent its job and blocks until none of its processes is left. `signals` of make_signal_fd(): the user's
/// signals, SIGCHLD, SIGUSR1 and SIGUSR2. `inherited_children`: descendants of this process that existed before the
/// job; they are not killed.
JobOutcome supervise(const RunOptions& options, PreparedJob job, int signals,
                     const std::vector<pid_t>& inherited_children);

/// How long an agent may be silent; 0: without limit.
std::chrono::milliseconds agent_silence_limit(const job::HealthLimits& limits);

}  // namespace lockstep::launcher
