// The options that say on which hosts, and how these are reached: the same for every verb that goes to hosts.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/launch/cli/host_list.h"

namespace CLI {
class App;
}

namespace lockstep::launcher {

struct HostOptions {
  std::vector<Host> hosts;  ///< empty: those of the SLURM allocation that we are in, else this one
  std::string remote_path;  ///< of the program lockstep on hosts that name no other; empty: as here
  std::string
      slurm_step;  ///< "JOB.STEP": on other hosts a task of this SLURM step waits for the agent's end; empty: none
  std::chrono::seconds connect_timeout{10};  ///< of ssh
  std::string directory;                     ///< that the ranks start in, on every host; empty: this process's
  std::string interface;          ///< as parse_interface_filter() takes it; empty: the one that routes to the launcher
  std::string env_from = "auto";  ///< who says where when hosts is empty: auto, slurm or none
};

/// The options as text, until check_host_options().
struct RawHostOptions {
  std::string hosts, host_file, env_from, remote_path, connect_timeout, interface, cwd;
};

/// Declares -H, --hostfile, --env-from, --remote-path, --connect-timeout, --interface and --cwd. `raw` outlives the
/// parsing.
void declare_host_options(CLI::App& app, RawHostOptions& raw);

/// What was given, into `options`. Reads the file that --hostfile names. Throws UsageError; `verb` stands in its text.
void check_host_options(const CLI::App& app, const std::string& verb, const RawHostOptions& raw, HostOptions& options);

}  // namespace lockstep::launcher
