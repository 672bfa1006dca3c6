// Which hosts a job runs on, as people write them: a pure function of the text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// One host, as ssh takes it.
struct Host {
  std::string
      name;  ///< a name, an alias of ~/.ssh/config, or an address (IPv6 without brackets); never starts with '-'
  std::string user;         ///< empty: as ssh finds it
  int port = 0;             ///< of its sshd; 0: as ssh finds it
  int slots = 0;            ///< ranks that it takes, 1 to 4096; 0: not said, one for each GPU, else each physical core
  std::string remote_path;  ///< of the program lockstep there; empty: as here
  bool step =
      false;  ///< a host of the SLURM allocation that we are in: srun starts the agent there; not read from a list
  bool here = false;      ///< and it is this one
  std::string interface;  ///< whose address its ranks use, a name or a CIDR; empty: the one that routes to the launcher

  friend bool operator==(const Host&, const Host&) = default;
};

/// The value of -H: HOST[:SLOTS],…, each [user@]name, an IPv4 address, or an IPv6 address in brackets (without, it has
/// no slots). A host that is named again takes more ranks: they stay neighbours. Throws UsageError "-H:1:COLUMN: …"
/// with what stands there and what is allowed.
std::vector<Host> parse_host_list(std::string_view text);

/// A host file: a host a line, as in -H, then words name=value (slots, port, user, path, interface); from '#' on a
/// comment; empty lines. `name` of the file. Throws FormatError "NAME:LINE:COLUMN: …"; a file without a host is one as
/// well.
std::vector<Host> parse_host_file(const std::string& name, std::string_view text);

/// As ssh's last words take it: "user@name", or the name alone.
std::string ssh_destination(const Host& host);

}  // namespace lockstep::launcher
