// The start of a job: an agent on each host, all at once, and what each finds there.
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

struct StartedAgents {
  std::vector<Host> hosts;        ///< where; one that is empty: here
  std::vector<AgentLink> agents;  ///< of each
  std::vector<HostInfo> infos;    ///< empty where nothing was told
  std::vector<std::optional<base::UsageError>>
      failed;  ///< why a host cannot be used: it cannot be reached, or has another version of lockstep
  std::vector<std::chrono::milliseconds> took;  ///< until each had told
};

/// Programs to ship; null: none.
using StagedFiles = std::shared_ptr<const std::vector<StagedFile>>;

/// Starts, by ssh or srun, the agents of `options`' hosts (none: one here), elsewhere with `cargo`, and waits until
/// each has told what it finds, or has failed. `signals` as of make_signal_fd(): a person's ends it (Error
/// kInterrupted). `max_files`: soft limit of descriptors for agents.
StartedAgents start_agents(const HostOptions& options, const StagedFiles& cargo, std::chrono::milliseconds max_silence,
                           std::uint64_t max_files, int signals);

/// Of two hosts that are one machine, whose ranks would take the same cores and GPUs, the second has failed. Several
/// nodes of SLURM may be on one.
void mark_duplicate_hosts(StartedAgents& started);

/// When hosts have failed: tells each in a line, and takes them out; nothing runs there. With fewer than `least` left
/// lets nothing run anywhere, and throws UsageError that names the first one and how many there are.
void require_hosts(StartedAgents& started, std::size_t least);

/// Lets nothing run there; waits 6 s at most for each.
void kill_agents(std::vector<AgentLink>& agents);

/// Throws Error kInterrupted when a person has asked us to stop, and kPreempted when somebody has asked the ranks to
/// leave, of which there are none. `signals` as of make_signal_fd().
void check_interrupted(int signals);

/// Whether `host` means this machine: "localhost", its own name, or SLURM's for it. No ssh is needed for it.
bool is_local_host(const Host& host);

}  // namespace lockstep::launcher
