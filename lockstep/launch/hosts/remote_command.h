// Builds the command lines that start an agent on another host through ssh or srun, and explains their failures. Pure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/host_list.h"
#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::hosts {

/// Returns the ssh command line that starts the agent on `host`, whose remote_path is the path of lockstep there. ssh
/// asks no questions and exits if the connection is silent for more than twice base::net::host_timeout(). The remote
/// command is `exec PATH agent --guarded`, or `script` if that is not empty. A script must not contain single quotes
/// and must end by executing the agent. Throws UsageError if a shell would not read the path as one plain word.
/// Settings of the user's ssh_config that would change what the remote host executes or reads are overridden; with
/// `with_session_options`, also those that exist since OpenSSH 8.7.
std::vector<std::string> ssh_command(const cli::HostSpec& host, std::chrono::seconds connect_timeout,
                                     const std::string& script = {}, bool with_session_options = true);
/// Returns whether the ssh that prints `version` for `ssh -V`, "OpenSSH_9.2p1 Debian-2 ...", has the options
/// SessionType and StdinNull. Pure.
bool has_session_options(const std::string& version);

/// Returns the srun command line that starts the agent on a host of the current SLURM allocation. The agent is a step
/// of one task, which shares the job's resources on that host with all other steps. If `script` is not empty, the step
/// runs it instead.
std::vector<std::string> srun_command(const cli::HostSpec& host, const std::vector<std::string>& agent_arguments,
                                      const std::string& script = {});

/// Returns `environment` without the variables that make srun change the bytes that it forwards.
process::Environment srun_environment(process::Environment environment);

/// Returns the arguments of the agent on `host`, after the path of lockstep. `slurm_step` is HostOptions::slurm_step.
std::vector<std::string> agent_arguments(const cli::HostSpec& host, const std::string& slurm_step);

/// Returns an error, with a hint, that explains why an agent on another host sent no frame. `code` is the exit code of
/// ssh or srun; `text` is the text that they and the remote shell wrote to stderr.
base::UsageError agent_start_error(const cli::HostSpec& host, int code, const std::string& text);

}  // namespace lockstep::launcher::hosts
