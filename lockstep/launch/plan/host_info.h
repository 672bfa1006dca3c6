// What an agent finds on its host, told to the launcher before anything is planned.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/launch/plan/cpu_placement.h"

namespace lockstep::launcher {

struct HostInfo {
  std::string host;               ///< its own name for itself
  std::string version;            ///< of its program lockstep
  std::string build;              ///< the GNU build id of that
  std::string machine;            ///< what no other has, as job::host_id() says it
  std::vector<Cpu> cpus;          ///< that ranks may use
  int gpus = 0;                   ///< device files of NVIDIA's driver
  std::uint16_t master_port = 0;  ///< that the agent keeps for rank 0 of torch.distributed's programs
  std::string visible_gpus;       ///< its own CUDA_VISIBLE_DEVICES, as SLURM sets it; empty: not set
};

/// Of this host, by its affinity mask, /dev and environment; without master_port.
HostInfo collect_host_info();

}  // namespace lockstep::launcher
