#include "lockstep/launch/cli/host_options.h"

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/cli/option_parsing.h"
#include "lockstep/launch/process/program.h"

namespace lockstep::launcher {

void declare_host_options(CLI::App& app, RawHostOptions& raw) {
  declare_option(app, "-H,--hosts", raw.hosts, "HOST[:SLOTS],...",
                 "where they run: names, [user@] in front, IPv6 in brackets; one ssh a host; default: those of the "
                 "SLURM allocation, else here");
  declare_option(
      app, "--hostfile", raw.host_file, "FILE",
      "the same, a host a line: host:4, or host slots=4; also port=, user=, path= and interface=; # begins a comment");
  declare_option(
      app, "--env-from", raw.env_from, "WHO",
      "who names the hosts when you do not: auto (default; SLURM, inside an allocation), slurm or none (this host)");
  declare_option(app, "--remote-path", raw.remote_path, "PATH", "of lockstep on the other hosts; default: as here");
  declare_option(app, "--connect-timeout", raw.connect_timeout, "SECONDS", "that ssh has to reach a host (default 10)");
  declare_option(app, "--interface", raw.interface, "WHICH",
                 "addresses that ranks use: names and networks, eth0 or 10.0.0.0/8, or all but these, ^docker0; "
                 "default: those that route to this host");
  declare_option(app, "--cwd", raw.cwd, "DIR", "directory that the ranks start in, on every host (default: this one)");
}

void check_host_options(const CLI::App& app, const std::string& verb, const RawHostOptions& raw, HostOptions& options) {
  const auto given = [&](const char* name) { return is_given(app, name); };
  if (given("-H") && given("--hostfile"))
    throw base::UsageError("lockstep " + verb + ": both -H and --hostfile are given; allowed is one of them");
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

}  // namespace lockstep::launcher
