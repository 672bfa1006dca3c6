// What a rank shows of itself: a page of memory that another process of the same user can read, as `lockstep status` does.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::base {

/// Numbers of bytes of the arena, as in ArenaStats.
struct ArenaNumbers {
  std::atomic<std::uint64_t> live{0}, peak_live{0}, high_water{0}, resident{0};
};

/// Its owner writes it with plain stores; a reader may see numbers of two moments. Text ends with a zero.
struct RankPage {
  static constexpr char kMagic[8] = {'L', 'O', 'C', 'K', 'P', 'A', 'G', '1'};  // the last one changes with the layout
  char magic[8] = {};
  std::int32_t pid = 0;
  std::int32_t rank = 0;
  std::int32_t world_size = 0;
  char job[64] = {};
  char transport[32] = {};
  std::atomic<std::uint64_t> exchanges{0};  ///< of gradients that have begun, all models together
  ArenaNumbers arena;

  /// That of this process, zeroed at first, never freed: magic and pid stand once show_process() has been called. A child made by fork() has
  /// its parent's.
  static RankPage& process();
};

/// Fills the page of this process with who it is; from then on others see it.
void show_process(int rank, int world_size, const std::string& job, const std::string& transport);

/// A copy of a page, checked: it may come from a stranger.
struct RankSeen {
  pid_t pid = 0;
  int rank = 0;
  int world_size = 0;
  std::string job, transport;
  std::uint64_t exchanges = 0;
  std::uint64_t live_bytes = 0, peak_live_bytes = 0, high_water_bytes = 0, resident_bytes = 0;  ///< of the arena
};

/// The page of process `pid`, if it is a rank, of this user, and has not ended.
std::optional<RankSeen> look_at_rank(pid_t pid);

}  // namespace lockstep::base
