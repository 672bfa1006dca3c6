#include "lockstep/launch/cli/host_options.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/fd.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/cli/option_table.h"

namespace lockstep::launcher::cli {
namespace {

constexpr std::array kHostSources = {"auto", "slurm", "none"};

/// Returns the content of a text file of at most 1 MiB.
std::string read_option_file(const std::string& what, const std::string& file) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
  const auto refuse = [&](const std::string& why) {
    throw base::UsageError(what + " is " + base::quoted(file, 256) + ": " + why + "; expected a text file");
  };
  const base::Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (!fd || ::fstat(fd.get(), &info) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(info.st_mode)) refuse("a directory");
  std::string text;
  char bytes[1 << 14];
  while (const ssize_t size = ::read(fd.get(), bytes, sizeof bytes)) {
    if (size < 0) refuse(std::strerror(errno));
    text.append(bytes, static_cast<std::size_t>(size));
    if (text.size() > kMaxBytes) refuse("longer than " + std::to_string(kMaxBytes) + " bytes");
  }
  return text;
}

using Hosts = OptionType<std::vector<HostSpec>>;

}  // namespace

void add_host_options(OptionTable& table, HostOptions& options, const std::string& example) {
  table.group("Hosts", example);
  table.option(
      "-H,--hosts", options.hosts,
      Hosts{"HOST[:SLOTS],...", [](const std::string&, const std::string& list) { return parse_host_list(list); }},
      "hosts, each with its number of ranks: names or addresses, with USER@ in front if needed, IPv6 in brackets; each "
      "is reached by one ssh connection (default: the hosts of the SLURM allocation, else this host)");
  table.option(
      "--hostfile", options.hosts,
      Hosts{"FILE", [](const std::string& what,
                       const std::string& file) { return parse_host_file(file, read_option_file(what, file)); }},
      "the same from a file with one host per line: host:4 or host slots=4, also port=, user=, path= and interface=; # "
      "starts a comment");
  table.exclude("-H", "--hostfile");
  table.option("--env-from", options.env_from, choice_of("SOURCE", kHostSources),
               "source of the hosts if none are given: {default} (default; SLURM inside an allocation), slurm or none "
               "(this host)");
  table.option("--remote-path", options.remote_path, text("PATH", "the path of lockstep on the other hosts"),
               "path of lockstep on the other hosts (default: its path here)");
  table.option("--connect-timeout", options.connect_timeout, whole_seconds(1, 3600),
               "time limit for ssh to connect to a host (default {default})");
  table.option(
      "--interface", options.interface, checked_text("LIST", parse_interface_filter),
      "network interfaces that ranks use, by name or network, as in eth0 or 10.0.0.0/8; ^docker0 stands for all but "
      "docker0 (default: the interface that routes to this host)");
  table.option("--cwd", options.directory, text("DIR", "a directory"),
               "directory in which the ranks start, on every host (default: this directory)");
}

}  // namespace lockstep::launcher::cli
