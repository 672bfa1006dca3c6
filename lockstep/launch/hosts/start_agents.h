// Starts one agent on each host, all at once, and collects their facts about the hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/hosts/pods.h"
#include "lockstep/launch/plan/host_info.h"

namespace lockstep::launcher::hosts {

/// The result of start_agents(): one entry per host in each vector.
struct StartedAgents {
  std::vector<cli::HostSpec> hosts;  ///< a host with an empty name is this host
  std::vector<AgentLink> agents;
  std::vector<std::optional<plan::HostInfo>> infos;
  /// Why a host cannot be used: it is unreachable, or runs another version of lockstep. Set if there is no HostInfo.
  std::vector<std::optional<base::UsageError>> failed;
  std::vector<std::chrono::milliseconds> startup_times;  ///< time until each HostInfo arrived
};

/// Starts one agent on each of `options.hosts`, or on this host if there are none. Uses ssh or srun for other hosts,
/// and copies `staged_files` to them. `pod_agents` has an entry for each other host that is a pod, in their order.
/// Blocks until each agent has sent its HostInfo or has failed; an agent that sends none within the connect timeout
/// plus 10 s (more for many hosts or large files) has failed. Does not throw for a failed host.
///
/// `max_silence` is as for AgentLink. `max_files` is the agents' soft limit of file descriptors. `signals` is a
/// descriptor of make_signal_fd(): on a user's signal, throws as check_interrupted() does. Throws UsageError if ssh or
/// srun is not installed, and SystemError.
StartedAgents start_agents(const cli::HostOptions& options, const StagedFiles& staged_files,
                           std::chrono::milliseconds max_silence, std::uint64_t max_files, int signals,
                           std::vector<std::optional<PodMeeting::Agent>> pod_agents = {});

/// Marks a host as failed if it is the same machine as an earlier host, because their ranks would share cores and GPUs.
/// Ignores hosts of a SLURM allocation and pods, of which several may be on one machine.
void mark_duplicate_hosts(StartedAgents& started);

/// Removes the failed hosts, kills their agents, and prints one line for each. If fewer than `min_hosts` hosts are
/// left, kills all agents and throws UsageError with the first failure and the number of failures. Does nothing if no
/// host has failed.
void require_hosts(StartedAgents& started, std::size_t min_hosts);

/// Kills all agents and waits until they have exited. Blocks for at most 6 s per agent.
void kill_agents(std::vector<AgentLink>& agents);

/// Reads the pending signals of `signals`, a descriptor of make_signal_fd(). Throws Error kInterrupted for SIGINT,
/// SIGQUIT, SIGTERM and SIGHUP, and kPreempted for SIGUSR1. For use before any rank runs. Does not block.
void check_interrupted(int signals);

/// Returns whether `host` is this machine, so that its agent is started without ssh or srun: HostSpec::is_local is set
/// for a host of a SLURM allocation and a pod; otherwise the name is empty, "localhost" or this host's own name, and no
/// user and no port are given.
bool is_local_host(const cli::HostSpec& host);

/// Returns the path of the program `name` as a shell on this host would find it; all hosts use the same path. A path
/// need not exist on this host if no rank runs here. Throws UsageError.
std::string resolve_program(const cli::HostOptions& options, const std::string& name);

}  // namespace lockstep::launcher::hosts
