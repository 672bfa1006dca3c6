// Distributes the cores of a host over its ranks.
#pragma once

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

}  // namespace lockstep::launcher::plan
