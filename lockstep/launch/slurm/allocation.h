// Determines the hosts of a job that names none: those of a SLURM allocation, or of mpirun's host file.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher::slurm {

/// Returns the hosts of a job whose host list is `named`. If the list is empty, returns all hosts of the SLURM
/// allocation that this process runs in; each has as many slots as tasks were requested, or 0 if no number was given.
/// Sets HostSpec::is_slurm of a host that belongs to the allocation, if it has no user and no port: srun starts an
/// agent there without an ssh key.
///
/// If the list is empty and there is no allocation, returns the hosts of the file that OMPI_MCA_orte_default_hostfile
/// names, as Kubeflow's mpi runtime sets it in the pod that starts the others, unless mpirun has started this process.
///
/// Otherwise returns `named` unchanged. `env_from` is "auto", "slurm" (requires an allocation) or
/// "none" (ignores both). Throws UsageError if the variables of SLURM are invalid, and if srun has started
/// `lockstep run` several times.
std::vector<cli::HostSpec> resolve_hosts(std::vector<cli::HostSpec> named, const std::string& env_from,
                                         const base::Env& env);

}  // namespace lockstep::launcher::slurm
