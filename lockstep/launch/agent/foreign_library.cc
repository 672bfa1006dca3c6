#include "lockstep/launch/agent/foreign_library.h"

#include <fstream>
#include <string>

namespace lockstep::launcher::agent {

std::string_view find_foreign_library(const std::vector<pid_t>& pids) {
  for (const pid_t pid : pids) {
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    for (std::string mapping; std::getline(maps, mapping);) {
      if (mapping.find("/mpi4py/MPI.") != std::string::npos) return "mpi4py";
      // horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so; tensorflow/mpi_lib and mxnet/mpi_lib
      const std::size_t package = mapping.find("/horovod/");
      if (package != std::string::npos && mapping.find("/mpi_lib", package) != std::string::npos) return "Horovod";
    }
  }
  return "";
}

}  // namespace lockstep::launcher::agent
