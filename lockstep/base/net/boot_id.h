// Identifies the running kernel of this host.
#pragma once

#include <string>

namespace lockstep::base::net {

/// Returns the random ID that the kernel of this host generated when it started, 36 characters. Processes with the same
/// ID run on the same kernel. Returns "" if /proc is not available.
std::string boot_id();

}  // namespace lockstep::base::net
