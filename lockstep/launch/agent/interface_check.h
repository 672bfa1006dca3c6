// Checks the user's settings for network interfaces on one host.
#pragma once

#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::agent {

/// Checks the user's settings for Gloo and NCCL against the interfaces of this host. Throws UsageError.
void check_interfaces(const process::Environment& environment);

}  // namespace lockstep::launcher::agent
