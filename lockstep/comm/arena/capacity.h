// The size of the arena of a process.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep::comm::arena {

struct Capacity {
  std::size_t bytes = 0;
  std::string limit;  ///< "ulimit -v" or "ulimit -f" if that is the reason; else empty
};

/// Returns a quarter more than the physical memory, to allow for fragmentation, unless the process has a limit: then it
/// writes a line about it to the log. Batch systems such as PBS and SGE may limit the addresses of a process (ulimit
/// -v); half of those that are left are for the arenas of this host. The limit on file sizes (ulimit -f) also applies
/// to shared memory.
Capacity choose_capacity();

}  // namespace lockstep::comm::arena
