// CPU time and memory of a process.
#pragma once

#include <cstdint>

namespace lockstep::training::inline report {

/// Resource usage of this process.
struct ResourceUsage {
  double cpu_seconds = 0;                 ///< of all threads, since the start of the process
  std::uint64_t resident_bytes = 0;       ///< current memory, including shared pages
  std::uint64_t peak_resident_bytes = 0;  ///< maximum of resident_bytes

  /// Reads the current values from the kernel; takes about 10 us.
  static ResourceUsage now();
};

}  // namespace lockstep::training::inline report
