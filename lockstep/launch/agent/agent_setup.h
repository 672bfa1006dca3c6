// What an agent does before its ranks start: reports its host, takes part in the network check, and receives the job.
#pragma once

#include <optional>

#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// The result of set_up_agent().
struct AgentSetup {
  JobPlan job;
  base::Fd liveness_fd;  ///< a connection to the launcher besides stdin and stdout; none if all ranks are on this host
  base::Fd master_port;  ///< reserved for torch.distributed's rendezvous while the job runs
};

/// Exchanges frames with the launcher through stdin and stdout until the job arrives. Blocks for at most 10 minutes.
/// Bytes after the job stay in `input`. Returns nothing if the launcher has ended, in which case it has reported why.
/// Throws Error kProtocol.
std::optional<AgentSetup> set_up_agent(FrameReader& input);

}  // namespace lockstep::launcher
