// The options that choose the hosts and how to reach them, shared by all subcommands that use several hosts.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/timeouts.h"
#include "lockstep/launch/cli/host_list.h"

namespace CLI {
class App;
}

namespace lockstep::launcher::cli {

/// The checked options.
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

/// The options as text, before check_host_options() has checked them.
struct RawHostOptions {
  std::string hosts = {}, host_file = {}, env_from = {}, remote_path = {}, connect_timeout = {}, interface = {},
              cwd = {};
};

inline constexpr const char* kHostGroup = "Hosts";  ///< heading of these options in a help text

/// Declares -H, --hostfile, --env-from, --remote-path, --connect-timeout, --interface and --cwd in the group
/// kHostGroup. Parsing writes to `raw`, which must exist until then.
void declare_host_options(CLI::App& app, RawHostOptions& raw);

/// Checks the options that are on the command line and stores them in `options`. Reads the file that --hostfile names.
/// Throws UsageError or FormatError; `subcommand` is part of the message.
void check_host_options(const CLI::App& app, const std::string& subcommand, const RawHostOptions& raw,
                        HostOptions& options);

}  // namespace lockstep::launcher::cli
