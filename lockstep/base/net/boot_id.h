// Identifies the running kernel of this host.
#pragma once

#include <fstream>
#include <string>

namespace lockstep::base::net {

/// Returns the random ID that the kernel of this host generated when it started, 36 characters. Processes with the same
/// ID run on the same kernel. Returns "" if /proc is not available.
inline std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace lockstep::base::net
