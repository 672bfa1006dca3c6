// How an agent is started on another host: what ssh or srun is told, and what it means when that does not work. Pure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/host_list.h"
#include "lockstep/launch/plan/job_plan.h"

namespace lockstep::launcher {

/// The words that start the agent on `host`, whose remote_path is where the program is: ssh without questions, which
/// ends when the connection is silent for 6 s, and `exec PATH agent --guarded` there; or, when there is a `script`
/// (without single quotes), that one, which does the same in the end. Throws UsageError when a shell there would not
/// take the path as one plain word.
std::vector<std::string> ssh_command(const Host& host, std::chrono::seconds connect_timeout,
                                     const std::string& script = {});

/// The same for a host of the SLURM allocation that we are in: a step of one task, which shares what the job has there
/// with all other steps.
std::vector<std::string> srun_command(const Host& host, const std::vector<std::string>& agent_arguments,
                                      const std::string& script = {});

/// `environment` without what changes the bytes that srun passes on.
Environment srun_environment(Environment environment);

/// What follows the path of the program. `attended`: as RunOptions has it.
std::vector<std::string> agent_arguments(const Host& host, const std::string& slurm_step);

/// What an agent on another host that never spoke died of: in words, with a hint of what to do. `code` is ssh's or
/// srun's, `text` what they and the shell there wrote.
base::UsageError agent_start_error(const Host& host, int code, const std::string& text);

}  // namespace lockstep::launcher
