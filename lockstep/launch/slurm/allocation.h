// The hosts that SLURM has given to a job. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher {

/// Where a job runs whose list of hosts is `named`: with an empty one, inside an allocation or a batch script of SLURM,
/// on all hosts of that; each with as many slots as tasks were asked for, or none when nobody said. Hosts of the
/// allocation that are named without user and port get Host::step, so that srun reaches them, which needs no key.
/// `env_from`: auto, slurm (there must be an allocation) or none (there is none, whatever the environment says). Throws
/// UsageError, also when srun starts several of us: one is enough.
std::vector<Host> resolve_hosts(std::vector<Host> named, const std::string& env_from, const base::Env& env);

}  // namespace lockstep::launcher
