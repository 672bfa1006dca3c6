// The facts about a host that its agent sends to the launcher before the job is planned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/launch/plan/cpu_placement.h"

namespace lockstep::launcher::plan {

/// The facts about one host.
struct HostInfo {
  std::string host;               ///< its own host name
  std::string version;            ///< version of its program lockstep
  std::string build;              ///< GNU build id of that program
  std::string machine;            ///< identifier of the host; see job::host_id()
  std::vector<Cpu> cpus;          ///< CPUs that ranks may use
  int gpus = 0;                   ///< number of device files of NVIDIA's driver
  std::uint16_t master_port = 0;  ///< port that the agent reserves for rank 0 of programs with torch.distributed
  std::string visible_gpus;       ///< the agent's CUDA_VISIBLE_DEVICES, which SLURM may set; empty: not set
};

/// Returns the facts about this host, from its affinity mask, /dev and the environment. Does not set master_port.
HostInfo collect_host_info();

}  // namespace lockstep::launcher::plan
