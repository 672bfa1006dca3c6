// The options that choose the hosts and how to reach them, shared by all subcommands that use several hosts.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/timeouts.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher::cli {

class OptionTable;

struct HostOptions {
  /// Empty: all hosts of our SLURM allocation, or this host if there is no allocation.
  std::vector<HostSpec> hosts = {};
  /// Path of the program lockstep on the other hosts; empty: the same path as on this host.
  std::string remote_path = {};
  std::string slurm_step = {};  ///< "JOB.STEP": on other hosts a task of this SLURM step waits until the agent ends;
                                ///< may be empty
  std::chrono::seconds connect_timeout = base::kDefaultConnectTimeout;  ///< for ssh
  std::string directory = {};  ///< working directory of the ranks on every host; empty: the launcher's
  /// In the syntax of parse_interface_filter(); empty: the one that routes to the launcher.
  std::string interface = {};
  std::string env_from = "auto";  ///< source of the hosts if `hosts` is empty: auto, slurm or none
};

/// Adds -H, --hostfile, --env-from, --remote-path, --connect-timeout, --interface and --cwd in a group of their own.
/// Parsing reads the file that --hostfile names, and throws a FormatError for an error in it.
void add_host_options(OptionTable& table, HostOptions& options, const std::string& example);

}  // namespace lockstep::launcher::cli
