// The command `lockstep doctor`: checks on each host, before anything starts, whether a program can run there.
#pragma once

#include "lockstep/launch/cli/doctor_options.h"

namespace lockstep::launcher {

/// Runs the checks through an agent on each host, prints the findings and returns when no agent is left: 0 if nothing
/// is bad, else 1. A host that is unreachable or stops replying is a finding. Takes 20 s, up to 90 s if a tool on a
/// host does not finish, and up to 2 s for each measured link: those of all pairs of at most 16 hosts, else those of
/// adjacent hosts in the list. Call it from the main thread before other threads exist; it takes over signal handling.
/// Throws Error before any host is contacted if the request is invalid, and kInterrupted.
int doctor(DoctorOptions options);

}  // namespace lockstep::launcher
