// One generation of a job. supervise() prints the output of the ranks, determines which rank failed first, and stops
// all ranks together; run_generation() starts the agents, assigns the ranks to hosts, and then supervises them.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/hosts/pods.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/output/output.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/supervise/restarts.h"

namespace lockstep::launcher::supervise {

/// A job whose agents run and whose hosts reach each other.
struct PreparedJob {
  plan::LaunchContext context;  ///< store.host is the address for the store; supervise() sets its port and the key
  std::vector<hosts::AgentLink> agents;
  std::vector<plan::Node> nodes;  ///< one per agent
  std::string start_note;         ///< a line to print at the start; empty: none
};

/// How a generation ended. Its processes have ended, except on unreachable hosts.
struct JobOutcome {
  std::optional<Verdict> verdict;   ///< nullopt: all ranks returned 0
  bool is_stopped = false;          ///< a user has stopped the job, before or after the verdict
  bool preempted_too_late = false;  ///< SIGUSR1 arrived when the ranks were already ending
  Attempt attempt;
  std::set<std::size_t> lost_hosts;   ///< numbers of the hosts that failed, as opposed to their ranks
  bool has_unreachable_host = false;  ///< a host is unreachable; its processes end within 10 s
  std::string failure_report;  ///< lines to print: where the ranks were, and the last stderr lines of the culprit
  std::unique_ptr<output::Output> output;  ///< the caller must call finish(); null: no output was created
};

/// Sends each agent its job and blocks until the processes of the job have ended. `signals` is a descriptor of
/// make_signal_fd() for handled_signals(). `inherited_children` are descendants of this process that existed before the
/// job; they are not killed. Throws Error before any rank has started, for example if a host has too few GPUs; later
/// failures, such as an invalid frame of an agent, become the verdict. Call it from the main thread.
JobOutcome supervise(const cli::RunOptions& options, PreparedJob job, int signals,
                     const std::vector<pid_t>& inherited_children);

/// The settings that all generations of a job share.
struct JobSpec {
  cli::RunOptions options;                    ///< its hosts are all hosts of the job
  plan::LaunchContext context;                ///< without what each generation sets: addresses, key and generation
  hosts::PodMeeting* pods = nullptr;          ///< with the launchers in other pods; null: none
  std::chrono::milliseconds pods_timeout{0};  ///< how long to wait for all of them
  hosts::StagedFiles staged_files;
  std::uint64_t max_files = 0;            ///< soft limit of file descriptors for agents
  int signals = -1;                       ///< a descriptor of make_signal_fd(), as for supervise()
  std::vector<pid_t> inherited_children;  ///< as for supervise()
};

/// The number of ranks of a generation, and of the hosts that they are on.
struct WorldSize {
  int ranks = 0;
  std::size_t hosts = 0;

  friend bool operator==(const WorldSize&, const WorldSize&) = default;
};

/// The number of hosts of a job: at least 1, this one.
std::size_t count_hosts(const cli::RunOptions& options);

/// Starts the job on the hosts with the numbers `hosts`, of which it needs at least `min_hosts`, and blocks until it
/// has ended. In generation 0, throws Error if the job cannot be started; in later generations such an error becomes
/// the verdict.
///
/// `world` is the size of the previous generation. The call sets it to the size of this one and prints a line if they
/// differ. Later generations write their files into directories gen.N.
JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts,
                          std::size_t min_hosts, WorldSize& world);

}  // namespace lockstep::launcher::supervise
