// A program that srun has started once on each host, and that starts its own ranks there: the first of its processes
// becomes the launcher, and the others wait for the agents that the launcher starts beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {

/// What the process of a task, one of a step that has one on each host, becomes: the words after `lockstep`. Nothing
/// when this is no such task. `ranks` of each host, 0: as many as `lockstep run` finds; 1: the task is the rank itself.
/// Pure. Throws UsageError.
std::optional<std::vector<std::string>> task_arguments(int ranks, const base::Env& env);

/// Waits until an agent of `step`, "JOB.STEP", which must come within a minute, has been here and gone. Only the user's
/// own processes can be it. The exit code: 0, or 69 when none came.
int wait_for_agent(const std::string& step);

/// The connection to the process that waits for this agent; its end is the agent's. None when nobody waits after 15 s.
base::Fd connect_to_task(const std::string& step);

}  // namespace lockstep::launcher
