// The phase of an agent before its ranks start: it gets a guard, reports its host, takes part in the network check,
// answers `lockstep doctor`, receives the job, and checks this host for it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::agent {

/// Forks. Returns in the child, which is the agent. The parent remains as its guard: when the agent ends, the guard
/// kills all processes that the agent has started, and exits with the agent's exit code. The guard ignores signals that
/// SLURM sends to all processes before it ends a job; the ranks handle them. Throws SystemError if fork() fails.
void fork_guarded_agent();

/// Returns "mpi4py" or "Horovod" if one of the processes has loaded the extension module of that library, according to
/// the files in its address space; otherwise an empty text. Ignores processes that have ended.
std::string_view find_foreign_library(const std::vector<pid_t>& pids);

/// Checks the user's settings for Gloo and NCCL against the interfaces of this host. Throws UsageError.
void check_interfaces(const process::Environment& environment);

struct AgentSetup {
  plan::JobPlan job;
  base::Fd liveness_fd;  ///< without data; ends when the launcher is lost; none if all ranks are on this host
  base::Fd master_port;  ///< reserved for torch.distributed's rendezvous while the job runs
};

/// Exchanges frames with the launcher through stdin and stdout until the job arrives. Bytes after the job stay in
/// `input`. Returns nullopt if the launcher has closed its end; the launcher has then reported why. Throws Error
/// kProtocol for an invalid frame, and if no job arrives within 10 minutes.
std::optional<AgentSetup> set_up_agent(protocol::FrameReader& input);

}  // namespace lockstep::launcher::agent
