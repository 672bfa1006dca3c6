#include "lockstep/launch/agent/mpi4py.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace lockstep::launcher::agent {

bool any_has_mpi4py(const std::vector<pid_t>& pids) {
  return std::any_of(pids.begin(), pids.end(), [](pid_t pid) {
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    for (std::string mapping; std::getline(maps, mapping);)
      if (mapping.find("/mpi4py/MPI.") != std::string::npos) return true;
    return false;
  });
}

}  // namespace lockstep::launcher::agent
