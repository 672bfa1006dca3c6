// Which cores a rank runs on.
#pragma once

#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// A logical CPU that this process may use.
struct Cpu {
  int id = 0;
  int core = 0;  ///< the lowest CPU of the same physical core
  int node = 0;  ///< NUMA node
};

/// The CPUs in this process's affinity mask, with their places as sysfs tells them. A machine without sysfs has one
/// core a CPU and one node.
std::vector<Cpu> usable_cpus();

/// Number of physical cores among `cpus`.
int num_cores(const std::vector<Cpu>& cpus);

/// The CPUs of each of `ranks` ranks: whole cores, neighbours together, node by node, sizes that differ by one core at
/// most. More ranks than cores: every rank gets all CPUs, because binding would only hinder the system. Pure.
std::vector<std::vector<int>> split_cpus(std::vector<Cpu> cpus, int ranks);

/// Reads "0-3,8"; what cannot be read is left out. Pure.
std::vector<int> parse_cpu_list(std::string_view text);

}  // namespace lockstep::launcher
