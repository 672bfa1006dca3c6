// A program that srun has started once per host and that starts its own ranks there: the process of the first host
// becomes the launcher, and the others wait for the agents that the launcher starts next to them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {

/// Returns the arguments after `lockstep` with which the process of a task continues, if its step has exactly one task
/// per host; else nothing. `ranks` per host; 0: as many as `lockstep run` chooses; 1: the task is the rank itself, so
/// nothing is returned. Pure. Throws UsageError.
std::optional<std::vector<std::string>> task_arguments(int ranks, const base::Env& env);

/// Blocks until an agent of `step`, "JOB.STEP", has connected and has ended. The agent must connect within one minute
/// and belong to the same user. Returns the exit code: 0, or 69 if no agent connected.
int wait_for_agent(const std::string& step);

/// Connects to the process that waits for this agent; the connection ends with the agent. Blocks for at most 15 s;
/// returns an empty Fd if no process listens.
base::Fd connect_to_task(const std::string& step);

}  // namespace lockstep::launcher
