// Statistics of the arena, the shared memory in which this process allocates its tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::comm::arena {

struct ArenaStats {
  std::uint64_t live_bytes = 0;        ///< bytes of blocks in use, including rounding
  std::uint64_t peak_live_bytes = 0;   ///< maximum of live_bytes
  std::uint64_t high_water_bytes = 0;  ///< distance from the start of the arena to the end of its highest block so far
  std::uint64_t resident_bytes = 0;    ///< bytes requested from the operating system and not returned
  std::uint64_t slab_bytes = 0;        ///< part of live_bytes in slabs of small blocks, including their free blocks
};

/// Returns the statistics of the arena of this process. If tensors are not allocated in the arena, the values count
/// only the internal blocks of groups. May be called from any thread.
ArenaStats arena_stats();

/// Returns the memory of freed tensors to the operating system; without this call the process keeps it for new tensors.
/// Returns the number of bytes. May be called from any thread.
std::size_t trim_arena();

}  // namespace lockstep::comm::arena
