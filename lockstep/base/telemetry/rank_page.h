// The state that a rank publishes in shared memory. Other processes of the same user read it, for example `lockstep
// status`. The agent of `lockstep run` creates the memory and keeps it, so the state can be read after the rank has
// died.
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

namespace lockstep::base::telemetry {

/// Byte counts of the arena, as in ArenaStats.
struct ArenaCounters {
  std::atomic<std::uint64_t> live, peak_live, high_water, resident;
};

/// A job's key as stored in a page (job/job_key.h); all zeros mean no key.
using JobKeyBytes = std::array<unsigned char, 32>;

/// The page of one rank. Its owner writes without locks, and reads are not atomic across fields: a reader may see
/// values of different times. Texts end with a zero. A zeroed page means "not initialised".
struct RankPage {
  static constexpr char kMagic[8] = {'L', 'O', 'C', 'K', 'P', 'A', 'G', '4'};  // last character: version of the layout
  char magic[8];
  std::int32_t pid;
  std::int32_t rank;
  std::int32_t world_size;
  char job[64];
  char transport[32];
  std::int64_t published_ticks, published_ns;  ///< time of publish_rank_page(), as ticks() and as monotonic_ns()
  std::atomic<std::int64_t> steps;
  std::atomic<std::int64_t> batches;               ///< drawn from data loaders
  std::atomic<std::uint64_t> gradient_reductions;  ///< started, in all models together
  std::atomic<std::uint64_t> alive_count;          ///< other signs of progress, such as calls of world.alive()
  std::atomic<std::uint64_t> heartbeats;           ///< of the heartbeat thread (job/health/heartbeat.h)
  std::atomic<std::uint32_t> waiting;              ///< 1 while the rank is blocked on another rank
  std::atomic<std::int32_t> busy_depth;            ///< long tasks that the program has announced and not yet ended
  std::atomic<std::uint32_t> has_left;             ///< 1 once the rank has left its world in good order
  std::atomic<std::uint32_t> stop_requested;  ///< written by the agent: the job has failed, and the store has the cause
  std::int32_t agent_pid;                     ///< written by the agent
  JobKeyBytes key;                            ///< written by the agent
  char busy_with[48];
  ArenaCounters arena;
  FlightRing flight;
  std::atomic<std::int64_t> durable_checkpoint;  ///< number of the newest durable checkpoint in which this process took
                                                 ///< part; 0 if there is none

  /// Returns the step count: calls of step(), or gradient reductions in a program that never calls step().
  std::int64_t step() const { return steps > 0 ? steps.load() : static_cast<std::int64_t>(gradient_reductions.load()); }

  /// Returns a counter that grows while the process makes progress: operations, steps, batches, and alive_count.
  std::uint64_t progress() const {
    return static_cast<std::uint64_t>(steps) + static_cast<std::uint64_t>(batches) + gradient_reductions + alive_count +
           flight.started;
  }

  /// Returns the page of this process. The first call maps the memory behind the descriptor LOCKSTEP_PAGE if an agent
  /// passed one, and otherwise creates memory that no agent reads; it throws SystemError if that fails. The page is
  /// never freed. It has no magic and no pid until publish_rank_page() has been called. A child created by fork()
  /// shares its parent's page. Thread-safe.
  static RankPage& this_process();
};

/// Returns the job key in the page that the agent created for this process, or for one of its ancestors: a program
/// between agent and rank may have closed the descriptor. Returns zeros if there is no page.
JobKeyBytes inherited_job_key();

/// Creates the memory for the page of a process that the caller will start. Throws SystemError.
SharedMemory create_rank_page();
/// Returns the page in `memory`, which must come from create_rank_page().
RankPage& rank_page_in(const SharedMemory& memory);

/// Writes the identity of this process to its page, then the magic, from which readers recognise a published page.
void publish_rank_page(int rank, int world_size, const std::string& job, const std::string& transport);

/// A validated copy of a page, which may belong to an untrusted process.
struct RankSnapshot {
  pid_t pid = 0;
  int rank = 0;
  int world_size = 0;
  std::string job, transport;
  std::int64_t steps = 0, batches = 0;
  std::uint64_t gradient_reductions = 0;
  bool waiting = false;   ///< blocked on another rank for some time
  bool has_left = false;  ///< left its world in good order
  std::string busy_with;  ///< the long task that the program has announced; empty if there is none
  std::uint64_t live_bytes = 0, peak_live_bytes = 0, high_water_bytes = 0, resident_bytes = 0;  ///< of the arena
  std::int64_t read_at_ns = 0;              ///< time of the copy, as monotonic_ns()
  std::vector<OperationRecord> operations;  ///< in the order of their starts; times as monotonic_ns()
};

/// Returns the page of process `pid` if it is a running rank of this user, else nullopt.
std::optional<RankSnapshot> find_rank_page(pid_t pid);
/// Returns what the process for which `memory` was created has published, even if it has ended since; nullopt if that
/// process has not called publish_rank_page().
std::optional<RankSnapshot> read_rank_page(const SharedMemory& memory);

}  // namespace lockstep::base::telemetry
