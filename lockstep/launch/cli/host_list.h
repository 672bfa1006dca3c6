// Parses the hosts of a job, from -H or from a host file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::cli {

/// One host of the command line or the host file.
struct HostSpec {
  /// A host name, an alias of ~/.ssh/config, or an address (IPv6 without brackets). Never begins with '-'.
  std::string name;
  std::string user;         ///< empty: ssh decides
  int port = 0;             ///< port of its sshd; 0: ssh decides
  int slots = 0;            ///< number of its ranks, 1 to 4096; 0: one per GPU, else one per physical core
  std::string remote_path;  ///< path of the program lockstep on that host; empty: its path on this host
  bool is_slurm = false;    ///< srun starts its agent, because it is in our SLURM allocation; parsers do not set it
  bool is_local = false;    ///< with is_slurm or is_pod: it is this host; parsers do not set it
  bool is_pod = false;      ///< the launcher there starts its agent (hosts/pods.h); parsers do not set it
  std::string interface;    ///< interface for its ranks, a name or a CIDR; empty: the one that routes to the launcher

  friend bool operator==(const HostSpec&, const HostSpec&) = default;
};

/// Parses the value of -H, [USER@]HOST[:SLOTS],... A HOST is a name, an IPv4 address, or an IPv6 address in brackets,
/// which may be omitted if no slots follow. The slots of a host that is listed several times are added; its ranks are
/// contiguous. Throws UsageError "-H:1:COLUMN: ..." with the text found there and the text expected.
std::vector<HostSpec> parse_host_list(std::string_view text);

/// Parses a host file: one host per line, in the syntax of -H, followed by words name=value (slots, port, user, path,
/// interface). '#' begins a comment; lines may be empty. `name` is the name of the file. Throws FormatError
/// "NAME:LINE:COLUMN: ...", also if the file has no host.
std::vector<HostSpec> parse_host_file(const std::string& name, std::string_view text);

/// Parses the host file `file`. `what` is the option or the variable that names it. Throws UsageError if it cannot be
/// read, and FormatError as parse_host_file() does.
std::vector<HostSpec> read_host_file(const std::string& what, const std::string& file);

/// Returns the destination argument for ssh: "user@name", or the name alone.
std::string ssh_destination(const HostSpec& host);

}  // namespace lockstep::launcher::cli
