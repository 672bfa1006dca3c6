// The phase of an agent before its ranks start: it reports its host, takes part in the network check, answers `lockstep
// doctor`, and receives the job.
#pragma once

#include <optional>

#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::agent {

/// The result of set_up_agent().
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
