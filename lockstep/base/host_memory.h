// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::base {

struct HostMemory {
  std::uint64_t available_bytes = 0;  ///< the least of what the host and the control groups of this process have left
  std::string limited_by;             ///< "the host" or the control group's folder

  /// Reads /proc/meminfo (MemAvailable) and memory.max and memory.current of this process's control group and those
  /// above it (version 2); takes about 50 us. A file that cannot be read limits nothing.
  static HostMemory now();
  /// The same from `read`, which returns a file's contents; tests give a map here.
  static HostMemory from(const std::function<std::optional<std::string>(const std::string& path)>& read);
};

}  // namespace lockstep::base
