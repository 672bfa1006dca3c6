#include "lockstep/launch/agent/interface_check.h"

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/launch/cli/interface_filter.h"

namespace lockstep::launcher::agent {

void check_interfaces(const process::Environment& environment) {
  std::vector<std::string> names;
  for (const base::net::InterfaceAddress& one : base::net::interface_addresses())
    if (std::find(names.begin(), names.end(), one.interface) == names.end()) names.push_back(one.interface);
  for (const std::string& variable : environment)
    for (const std::string name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
      const std::string error = variable.rfind(name + "=", 0) == 0
                                    ? cli::socket_ifname_error(name, variable.substr(name.size() + 1), names)
                                    : "";
      if (!error.empty())
        throw base::UsageError(error,
                               "unset it: lockstep then sets the interface through which the hosts reach each other");
    }
}

}  // namespace lockstep::launcher::agent
