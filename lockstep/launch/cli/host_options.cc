#include "lockstep/launch/cli/host_options.h"

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/cli/option_parsing.h"

namespace lockstep::launcher::cli {

void declare_host_options(CLI::App& app, RawHostOptions& raw) {
  begin_option_group(app, kHostGroup);
  declare_option(app, "-H,--hosts", raw.hosts, "HOST[:SLOTS],...",
                 "hosts, each with its number of ranks: names or addresses, with USER@ in front if needed, IPv6 in "
                 "brackets; each is reached by one ssh connection (default: the hosts of the SLURM allocation, else "
                 "this host)");
  declare_option(app, "--hostfile", raw.host_file, "FILE",
                 "the same from a file with one host per line: host:4 or host slots=4, also port=, user=, path= and "
                 "interface=; # starts a comment");
  declare_option(app, "--env-from", raw.env_from, "SOURCE",
                 "source of the hosts if none are given: auto (default; SLURM inside an allocation), slurm or none "
                 "(this host)");
  declare_option(app, "--remote-path", raw.remote_path, "PATH",
                 "path of lockstep on the other hosts (default: its path here)");
  declare_option(app, "--connect-timeout", raw.connect_timeout, "SECONDS",
                 "time limit for ssh to connect to a host (default 10)");
  declare_option(
      app, "--interface", raw.interface, "LIST",
      "network interfaces that ranks use, by name or network, as in eth0 or 10.0.0.0/8; ^docker0 stands for all "
      "but docker0 (default: the interface that routes to this host)");
  declare_option(app, "--cwd", raw.cwd, "DIR",
                 "directory in which the ranks start, on every host (default: this directory)");
}

void check_host_options(const CLI::App& app, const std::string& subcommand, const RawHostOptions& raw,
                        HostOptions& options) {
  const auto given = [&](const char* name) { return is_given(app, name); };
  if (given("-H") && given("--hostfile"))
    throw base::UsageError("lockstep " + subcommand + ": both -H and --hostfile are given; expected one of them");
  if (given("-H")) options.hosts = parse_host_list(raw.hosts);
  if (given("--hostfile"))
    options.hosts = parse_host_file(raw.host_file, read_option_file("--hostfile", raw.host_file));
  if (given("--connect-timeout"))
    options.connect_timeout =
        std::chrono::seconds(base::parse_int_in_range("--connect-timeout", raw.connect_timeout, 1, 3600));
  if (given("--remote-path"))
    options.remote_path = check_not_empty("--remote-path", raw.remote_path, "the path of lockstep on the other hosts");
  if (given("--env-from")) options.env_from = check_one_of("--env-from", raw.env_from, {"auto", "slurm", "none"});
  if (given("--cwd")) options.directory = check_not_empty("--cwd", raw.cwd, "a directory");
  if (!given("--interface")) return;
  parse_interface_filter("--interface", raw.interface);
  options.interface = raw.interface;
}

}  // namespace lockstep::launcher::cli
