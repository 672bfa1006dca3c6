// How full the memory is in which tensors of this process are born.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::comm {

struct ArenaStats {
  std::uint64_t live_bytes = 0;  ///< in blocks that are in use, rounding included
  std::uint64_t peak_live_bytes = 0;
  std::uint64_t high_water_bytes = 0;  ///< from the beginning to the end of the highest block ever
  std::uint64_t resident_bytes = 0;    ///< that the system has been asked for and not been given back
  std::uint64_t slab_bytes = 0;        ///< of live_bytes, in slabs of small blocks, free ones of those included
};

/// The arena of this process. All zero, but for what groups keep there, where the arena is not in use. Any thread.
ArenaStats arena_stats();

/// Gives the memory of freed tensors back to the system, which would otherwise stay with the process for the next ones.
/// Returns how many bytes those were. Any thread.
std::size_t trim_arena();

}  // namespace lockstep::comm
