// The memory that this process can still allocate on its host.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::base {

/// The memory left to this process, and what limits it.
struct HostMemory {
  std::uint64_t available_bytes = 0;  ///< the minimum of what the host and this process's control groups have left
  std::string cgroup;                 ///< directory of the control group that sets the minimum; empty if the host does

  /// Returns "the host" or "the control group DIRECTORY", for messages.
  std::string limited_by() const { return cgroup.empty() ? "the host" : "the control group " + cgroup; }

  /// Reads MemAvailable from /proc/meminfo, and memory.max and memory.current of this process's control group and its
  /// ancestors (cgroup version 2). Takes about 50 us. A file that cannot be read imposes no limit.
  static HostMemory now();
  /// Like now(), but calls `read`, which returns the content of a file, to read each file. For tests.
  static HostMemory from(const std::function<std::optional<std::string>(const std::string& path)>& read);
};

}  // namespace lockstep::base
