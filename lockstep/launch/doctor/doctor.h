// The command `lockstep doctor`: checks on each host whether a program can run there, without starting it.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::doctor {

/// Starts an agent on each host, runs the checks through it, prints the findings and ends the agents. Returns 0 if no
/// finding is bad, else 1. A host that is unreachable or stops replying is a finding.
///
/// Blocks for about 20 s, or up to 90 s if a tool on a host does not finish, plus up to 2 s for each measured link.
/// With at most 16 hosts, the links between all pairs are measured; with more, those between hosts that are adjacent in
/// the list.
///
/// Call it from the main thread before other threads exist; it takes over signal handling. If the request is invalid,
/// throws Error before it contacts a host. Throws Error kInterrupted on SIGINT, SIGQUIT, SIGTERM or SIGHUP, and
/// kPreempted on SIGUSR1.
int doctor(cli::DoctorOptions options);

}  // namespace lockstep::launcher::doctor
