// What an agent does before its ranks start: it tells what it finds, meets the other hosts, and takes the job.
#pragma once

#include <optional>

#include "lockstep/base/fd.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

struct AgentSetup {
  JobPlan job;
  base::Fd liveness_fd;  ///< its connection to the launcher beside stdin and stdout; none when all ranks are here
  base::Fd master_port;  ///< kept for the job
};

/// Talks with the launcher by stdin and stdout until the job has come; 10 minutes at most. What comes after it stays in
/// `input`. Nothing when the launcher is gone before: it has said why. Throws Error kProtocol.
std::optional<AgentSetup> set_up_agent(FrameReader& input);

}  // namespace lockstep::launcher
