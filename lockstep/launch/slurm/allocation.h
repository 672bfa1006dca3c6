// The hosts that SLURM has allocated to a job. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher {

/// Returns the hosts of a job whose host list is `named`. If the list is empty, inside a SLURM allocation or batch
/// script these are all of its hosts, with as many slots as tasks were requested, or 0 slots if no number was given. A
/// host that is named without user and port and belongs to the allocation gets HostSpec::is_slurm: srun reaches it
/// without an ssh key. `env_from`: auto, slurm (requires an allocation) or none (ignores it). Throws UsageError, also
/// if srun has started lockstep run several times.
std::vector<HostSpec> resolve_hosts(std::vector<HostSpec> named, const std::string& env_from, const base::Env& env);

}  // namespace lockstep::launcher
