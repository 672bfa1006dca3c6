// Detects programs that use a library for which `lockstep run` starts nothing, so that each rank is alone there.
#pragma once

#include <sys/types.h>

#include <string_view>
#include <vector>

namespace lockstep::launcher::agent {

/// Returns "mpi4py" or "Horovod" if one of the processes has loaded the extension module of that library, according to
/// the files in its address space; otherwise an empty text. Ignores processes that have ended.
std::string_view find_foreign_library(const std::vector<pid_t>& pids);

}  // namespace lockstep::launcher::agent
