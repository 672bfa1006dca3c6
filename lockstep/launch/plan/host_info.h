// The facts about a host that its agent sends to the launcher before the job is planned, and the CPUs of each rank.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::plan {

/// A logical CPU that this process may use.
struct Cpu {
  int id = 0;
  int core = 0;  ///< lowest CPU number of the same physical core
  int node = 0;  ///< NUMA node
};

/// Returns the CPUs in this process's affinity mask, with their cores and nodes from sysfs. Without sysfs, treats each
/// CPU as a core of its own on node 0.
std::vector<Cpu> usable_cpus();

/// Returns the number of physical cores among `cpus`.
int num_cores(const std::vector<Cpu>& cpus);

/// Returns the CPUs of each rank: whole, adjacent cores, filled node by node. The numbers of cores of two ranks differ
/// by at most one. With more ranks than cores, every rank gets all CPUs, because binding would only restrict the
/// scheduler. Pure.
std::vector<std::vector<int>> split_cpus(std::vector<Cpu> cpus, int ranks);

/// Parses a CPU list in the kernel's format, "0-3,8". Skips entries that are not valid. Pure.
std::vector<int> parse_cpu_list(std::string_view text);

struct HostInfo {
  std::string host;               ///< its own host name
  std::string version;            ///< version of its program lockstep
  std::string build;              ///< GNU build id of that program
  std::string machine;            ///< identifier of the host; see job::host_id()
  std::vector<Cpu> cpus;          ///< CPUs that ranks may use
  int cpu_quota = 0;              ///< CPUs' time that they may use, rounded down, at least 1; 0: no quota
  int gpus = 0;                   ///< number of device files of NVIDIA's driver
  std::uint16_t master_port = 0;  ///< port that the agent reserves for rank 0 of programs with torch.distributed
  std::string visible_gpus;       ///< the agent's CUDA_VISIBLE_DEVICES, which SLURM may set; empty: not set
};

/// Returns how many cores ranks may use at a time: those of `cpus`, or as many as the quota grants if it is less.
int usable_cores(const HostInfo& info);

/// Returns the facts about this host, from its affinity mask, control group, /dev and the environment. Does not set
/// master_port.
HostInfo collect_host_info();

}  // namespace lockstep::launcher::plan
