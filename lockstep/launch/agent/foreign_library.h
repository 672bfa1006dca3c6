// Detects programs that use mpi4py, for which `lockstep run` starts no MPI.
#pragma once

#include <sys/types.h>

#include <vector>

namespace lockstep::launcher::agent {

/// Returns whether one of the processes has loaded the extension module of mpi4py, according to the files in its
/// address space. Ignores processes that have ended.
bool any_has_mpi4py(const std::vector<pid_t>& pids);

}  // namespace lockstep::launcher::agent
