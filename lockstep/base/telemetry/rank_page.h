// What a rank shows of itself: a page of memory that another process of the same user can read, as `lockstep status`
// does. The agent of `lockstep run` makes it and keeps it, so that it outlives the rank.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/flight_ring.h"

namespace lockstep::base {

/// Numbers of bytes of the arena, as in ArenaStats.
struct ArenaCounters {
  std::atomic<std::uint64_t> live, peak_live, high_water, resident;
};

/// A job's key as a page carries it (job/job_key.h); zeros are none.
using JobKeyBytes = std::array<unsigned char, 32>;

/// Its owner writes it with plain stores; a reader may see numbers of two moments. Text ends with a zero. Zeroed memory
/// is one of which nothing is known.
struct RankPage {
  static constexpr char kMagic[8] = {'L', 'O', 'C', 'K', 'P', 'A', 'G', '4'};  // the last one changes with the layout
  char magic[8];
  std::int32_t pid;
  std::int32_t rank;
  std::int32_t world_size;
  char job[64];
  char transport[32];
  std::int64_t published_ticks, published_ns;  ///< when it was shown: ticks(), and the monotonic clock
  std::atomic<std::int64_t> steps;
  std::atomic<std::int64_t> batches;               ///< drawn from loaders
  std::atomic<std::uint64_t> gradient_reductions;  ///< of gradients that have begun, all models together
  std::atomic<std::uint64_t> alive_count;          ///< signs of life: that the program gave, and of what lasts long
  std::atomic<std::uint64_t> heartbeats;           ///< of a thread that does nothing else
  std::atomic<std::uint32_t> waiting;              ///< 1: nothing but another rank can make it go on
  std::atomic<std::int32_t> busy_depth;       ///< pieces of long work that the program has announced, and not ended
  std::atomic<std::uint32_t> has_left;        ///< 1: its world, in good order
  std::atomic<std::uint32_t> stop_requested;  ///< written by the watcher: the job has failed, and the store says why
  std::int32_t agent_pid;                     ///< written by the watcher: its pid
  JobKeyBytes key;                            ///< written by the watcher
  char busy_with[48];
  ArenaCounters arena;
  FlightRing flight;
  std::atomic<std::int64_t> durable_checkpoint;  ///< number of the newest checkpoint that is durable, of those that
                                                 ///< this process has taken part in; 0: none

  /// By which the process is numbered: its steps, or, of a program that never calls step(), its models' exchanges.
  std::int64_t step() const { return steps > 0 ? steps.load() : static_cast<std::int64_t>(gradient_reductions.load()); }

  /// Grows as long as the process does something that others may wait for.
  std::uint64_t progress() const {
    return static_cast<std::uint64_t>(steps) + static_cast<std::uint64_t>(batches) + gradient_reductions + alive_count +
           flight.started;
  }

  /// That of this process, zeroed at first, never freed: magic and pid stand once publish_rank_page() has been called.
  /// A child made by fork() has its parent's. It is the one behind the descriptor LOCKSTEP_PAGE, when that is one; else
  /// nobody watches.
  static RankPage& this_process();
};

/// The key in the page that was made for this process, or for one that has started it: a program between the two may
/// have closed the descriptor. Zeros when there is none.
JobKeyBytes inherited_job_key();

/// Memory for the page of a process that is to be started.
SharedMemory create_rank_page();
/// What lies in it.
RankPage& rank_page_in(const SharedMemory& memory);

/// Fills the page of this process with who it is; from then on others see it.
void publish_rank_page(int rank, int world_size, const std::string& job, const std::string& transport);

/// A copy of a page, checked: it may come from a stranger.
struct RankSnapshot {
  pid_t pid = 0;
  int rank = 0;
  int world_size = 0;
  std::string job, transport;
  std::int64_t steps = 0, batches = 0;
  std::uint64_t gradient_reductions = 0;
  bool waiting = false;   ///< for another rank, for some time
  bool has_left = false;  ///< its world, in good order
  std::string busy_with;  ///< empty: nothing that the program has announced
  std::uint64_t live_bytes = 0, peak_live_bytes = 0, high_water_bytes = 0, resident_bytes = 0;  ///< of the arena
  std::int64_t read_at_ns = 0;  ///< when, by the monotonic clock
  std::vector<OperationRecord>
      operations;  ///< the last ones, as they began; times are nanoseconds of the monotonic clock
};

/// The page of process `pid`, if it is a rank, of this user, and has not ended.
std::optional<RankSnapshot> find_rank_page(pid_t pid);
/// What the process for which `memory` was made has shown; it may have ended since. Nothing when it is no rank, or not
/// yet.
std::optional<RankSnapshot> read_rank_page(const SharedMemory& memory);

}  // namespace lockstep::base
