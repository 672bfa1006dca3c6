// What a process takes of its machine.
#pragma once

#include <cstdint>

namespace lockstep::train {

struct ResourceUsage {
  double cpu_seconds = 0;                 ///< of all its threads, since it began
  std::uint64_t resident_bytes = 0;       ///< memory now, with what it shares with others
  std::uint64_t peak_resident_bytes = 0;  ///< the most there was

  /// This process's, from the system; takes about 10 us.
  static ResourceUsage now();
};

}  // namespace lockstep::train
