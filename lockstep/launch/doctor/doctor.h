// `lockstep doctor`: what would keep a program from running on hosts, asked of each before anything starts.
#pragma once

#include "lockstep/launch/cli/doctor_options.h"

namespace lockstep::launcher {

/// Asks an agent on each host, prints the findings and returns when no agent is left: 0 when nothing is bad, 1 when
/// something is. A host that cannot be reached, or falls silent, is a finding. Takes 20 s, and up to 90 s when a tool
/// on a host does not end; and up to 2 s for each pair of hosts, of all pairs of at most 16 hosts, else of neighbours
/// in the list. Call it from the main thread before others exist; it takes over signal handling. Throws Error before
/// anybody was asked for what is not allowed, and kInterrupted.
int doctor(DoctorOptions options);

}  // namespace lockstep::launcher
