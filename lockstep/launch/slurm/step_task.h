// For a program that calls launch() and that srun has started once per host. The task on the first host becomes the
// launcher; the tasks on the other hosts wait for the agents that the launcher starts there.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher::slurm {

/// Returns the arguments of the program `lockstep` by which launch() replaces this task. Returns nullopt if the task is
/// a rank itself: `ranks` is 1, or the step does not have exactly one task per host. `ranks` is the number of ranks per
/// host; with 0, `lockstep run` chooses it. Pure. Throws UsageError.
std::optional<std::vector<std::string>> task_arguments(int ranks, const base::Env& env);

/// Blocks until an agent of `step`, "JOB.STEP", has connected and has ended. The agent must connect within one minute
/// and belong to the same user. Ignores SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2, which the launcher handles.
/// Returns the exit code: 0, or 69 if no agent connected. Throws SystemError.
int wait_for_agent(const std::string& step);

/// Connects to the task that waits for this agent. The agent must keep the connection open until it ends. Blocks for at
/// most base::kStepTaskTimeout. Returns an empty Fd if no task listens.
base::Fd connect_to_task(const std::string& step);

}  // namespace lockstep::launcher::slurm
