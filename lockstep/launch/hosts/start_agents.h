// Starts one agent on each host, all at once, and collects what each finds there.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/host_options.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/plan/host_info.h"

namespace lockstep::launcher {

/// The result of start_agents(): one entry per host in each vector.
struct StartedAgents {
  std::vector<HostSpec> hosts;  ///< an empty name: this host
  std::vector<AgentLink> agents;
  std::vector<HostInfo> infos;  ///< default-constructed for a host that sent none
  std::vector<std::optional<base::UsageError>>
      failed;  ///< why a host cannot be used: it is unreachable, or runs another version of lockstep
  std::vector<std::chrono::milliseconds> startup_times;  ///< from the start until each HostInfo arrived
};

/// Programs to copy to other hosts (--ship); null: none.
using StagedFiles = std::shared_ptr<const std::vector<StagedFile>>;

/// Starts the agents of `options.hosts` (none: one agent on this host) through ssh or srun, copies `staged_files` to
/// other hosts, and blocks until each agent has sent its HostInfo or has failed. `max_silence`: as for AgentLink.
/// `max_files`: soft limit of file descriptors for agents. `signals` of make_signal_fd(): a user's signal ends the wait
/// with Error kInterrupted.
StartedAgents start_agents(const HostOptions& options, const StagedFiles& staged_files,
                           std::chrono::milliseconds max_silence, std::uint64_t max_files, int signals);

/// If two hosts are the same machine, whose ranks would share cores and GPUs, marks the second one as failed. Several
/// nodes of SLURM may be on one machine.
void mark_duplicate_hosts(StartedAgents& started);

/// Prints one line for each failed host and removes it; no process stays there. If fewer than `min_hosts` hosts are
/// left, ends all agents and throws UsageError with the first failure and their number.
void require_hosts(StartedAgents& started, std::size_t min_hosts);

/// Kills all agents. Blocks for at most 6 s per agent.
void kill_agents(std::vector<AgentLink>& agents);

/// Throws Error kInterrupted if a user's signal is pending, and kPreempted for SIGUSR1. `signals` of make_signal_fd().
/// For use before any rank runs.
void check_interrupted(int signals);

/// True if `host` is this machine: "localhost", its own name, or its SLURM name. It needs no ssh.
bool is_local_host(const HostSpec& host);

}  // namespace lockstep::launcher
