// Command lines that start an agent on another host through ssh or srun, and the meaning of their failures. Pure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/host_list.h"
#include "lockstep/launch/plan/job_plan.h"

namespace lockstep::launcher {

/// Returns the ssh command line that starts the agent on `host`, whose remote_path is the path of lockstep there. ssh
/// asks no questions and exits when the connection is silent for 6 s. The remote command is `exec PATH agent
/// --guarded`, or `script` if it is given (without single quotes), which must end by executing the agent. Throws
/// UsageError if a shell would not take the path as one plain word.
std::vector<std::string> ssh_command(const HostSpec& host, std::chrono::seconds connect_timeout,
                                     const std::string& script = {});

/// The same for a host of the current SLURM allocation: an srun command line for a step of one task that shares the
/// job's resources on that host with all other steps.
std::vector<std::string> srun_command(const HostSpec& host, const std::vector<std::string>& agent_arguments,
                                      const std::string& script = {});

/// Returns `environment` without the variables that change the bytes srun passes on.
Environment srun_environment(Environment environment);

/// The arguments after the path of lockstep. `slurm_step`: as in HostOptions.
std::vector<std::string> agent_arguments(const HostSpec& host, const std::string& slurm_step);

/// Explains why an agent on another host never sent a frame, with a hint. `code` is the exit code of ssh or srun,
/// `text` what they and the remote shell wrote to stderr.
base::UsageError agent_start_error(const HostSpec& host, int code, const std::string& text);

}  // namespace lockstep::launcher
