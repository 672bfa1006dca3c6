// The state that a rank publishes in shared memory. Other processes of the same user read it, for example `lockstep
// status`. The agent of `lockstep run` creates the memory and keeps it, so the state can be read after the rank has
// died.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/atomic.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/flight_ring.h"
#include "lockstep/base/telemetry/shared_words.h"

namespace lockstep::base::telemetry {

/// Byte counts of the arena, as in ArenaStats.
struct ArenaCounters {
  Atomic<std::uint64_t> live, peak_live, high_water, resident;
};

/// A job's key as stored in a page (job/job_key.h); all zeros mean no key.
using JobKeyBytes = std::array<unsigned char, 32>;

/// The page of one rank. A zeroed page means "not initialised".
///
/// Memory ordering: publish_to() writes the identity, the plain members up to `published_ns`, and then stores `magic`
/// (release). A reader that loads kMagic (acquire) reads that identity, which never changes again. The agent writes
/// `agent_pid` and `key` before it starts the rank. All other members are atomic and change at any time: each value is
/// whole, but a reader may see values of different times. Only the flight ring orders its data (see there).
struct RankPage {
  /// "LOCKPAGA" in memory; the last character is the version of the layout.
  static constexpr std::uint64_t kMagic = 0x414741504b434f4c;
  struct BusyText {
    char text[48];
  };
  struct ExceptionText {
    char text[256];
  };
  Atomic<std::uint64_t> magic;
  Atomic<std::int32_t> pid;
  std::int32_t rank;
  std::int32_t world_size;
  char job[64];
  char transport[32];
  std::int64_t published_ticks, published_ns;  ///< time of publish_to(), as ticks() and as monotonic_ns()
  Atomic<std::int64_t> steps;
  Atomic<std::int64_t> batches;               ///< drawn from data loaders
  Atomic<std::uint64_t> gradient_reductions;  ///< started, in all models together
  Atomic<std::uint64_t> alive_count;          ///< other signs of progress, such as calls of world.alive()
  Atomic<std::uint64_t> work_count;           ///< heartbeats while `works` was set
  /// Looks at the operations of a program that is watched from outside, and those that found one that was not complete.
  Atomic<std::uint64_t> looks, pending_looks;
  Atomic<std::uint64_t> heartbeats;      ///< of the heartbeat thread (job/health/heartbeat.h)
  Atomic<std::uint32_t> waiting;         ///< threads of the program that are blocked on other ranks; see BlockedThread
  Atomic<std::uint32_t> main_waiting;    ///< those of them that are the main thread, in one wait or in several nested
  Atomic<std::uint64_t> store_bytes;     ///< sent to the job's store and received from it; does not count as work
  Atomic<std::int32_t> busy_depth;       ///< long tasks that the program has announced and not yet ended
  Atomic<std::uint32_t> has_left;        ///< 1 once the rank has left its world in good order
  Atomic<std::uint32_t> output_blocked;  ///< written by the agent: the rank waits because its output is not read
  Atomic<std::uint32_t> works;           ///< written by the agent: outside operations, and uses CPU or moves bytes
  Atomic<std::uint32_t> stop_requested;  ///< written by the agent: the job has failed, and the store has the cause
  std::int32_t agent_pid;                ///< written by the agent
  JobKeyBytes key;                       ///< written by the agent
  SharedWords<BusyText> busy_with;
  SharedWords<ExceptionText> handles;  ///< the exception that a program that waits is handling; empty: none
  ArenaCounters arena;
  FlightRing flight;
  Atomic<std::int64_t> durable_checkpoint;  ///< number of the newest durable checkpoint in which this process took
                                            ///< part; 0 if there is none
  /// Local ports of the TCP connections that the process had when it left its world; 0: none. Errors of Gloo name a
  /// peer by such a port. A rank with more than 64 has some of them.
  std::array<Atomic<std::uint16_t>, 64> tcp_ports;

  /// Returns the step count: calls of step(), or gradient reductions in a program that never calls step().
  std::int64_t step() const { return steps > 0 ? steps.load() : static_cast<std::int64_t>(gradient_reductions.load()); }

  /// Returns a counter that grows while the program reports progress: operations, steps, batches, and alive_count.
  std::uint64_t reported_progress() const {
    return static_cast<std::uint64_t>(steps) + static_cast<std::uint64_t>(batches) + gradient_reductions + alive_count +
           flight.started;
  }
  /// Returns a counter that also grows while the process works without reporting it.
  std::uint64_t progress() const { return reported_progress() + work_count; }

  bool is_published() const { return magic.load(std::memory_order_acquire) == kMagic; }

  /// Returns the page of this process. The first call maps the memory behind the descriptor LOCKSTEP_PAGE if an agent
  /// passed one, and otherwise creates memory that no agent reads; it throws SystemError if that fails. The page is
  /// never freed. It has no magic and no pid until publish_rank_page() has been called. A child created by fork()
  /// shares its parent's page. Thread-safe.
  static RankPage& this_process();
  /// Shows that the process is alive, and counts announced tasks and work as progress. Called once per second.
  void beat() noexcept;

  /// Returns whether an agent made this_process(), so that it is watched: not so in a process that a rank has started.
  static bool has_agent();
};

/// While an instance exists, a thread of the program is blocked until other ranks act, or until a device has executed
/// what depends on them. Not for threads of Lockstep that wait on behalf of a program that goes on. Only for waits that
/// have lasted for some time: it writes to memory that other processes read.
class BlockedThread {
 public:
  explicit BlockedThread(bool is_main);
  ~BlockedThread();
  BlockedThread(const BlockedThread&) = delete;
  BlockedThread& operator=(const BlockedThread&) = delete;
  /// Returns whether the calling thread is the main thread of the process.
  static bool is_main_thread();

 private:
  const bool is_main_;
};

/// Returns the job key in the page that the agent created for this process, or for one of its ancestors: a program
/// between agent and rank may have closed the descriptor. Returns zeros if there is no page.
JobKeyBytes inherited_job_key();

/// Creates the memory for the page of a process that the caller will start. Throws SystemError.
SharedMemory create_rank_page();
/// Returns the page in `memory`, which must come from create_rank_page().
RankPage& rank_page_in(const SharedMemory& memory);

/// The identity of a rank.
struct RankIdentity {
  int rank = 0;
  int world_size = 1;
  std::string job, transport;
};
/// Writes `identity` and the pid of this process to `page`, then the magic, from which readers recognise a published
/// page. If the page was published before, it is not while this function writes.
void publish_to(RankPage& page, const RankIdentity& identity);

/// A validated copy of a page, which may belong to an untrusted process.
struct RankSnapshot {
  pid_t pid = 0;
  int rank = 0;
  int world_size = 0;
  std::string job, transport;
  std::int64_t steps = 0, batches = 0;
  std::uint64_t gradient_reductions = 0;
  bool waiting = false;         ///< one of its threads has been blocked on another rank for some time
  bool has_left = false;        ///< left its world in good order
  bool output_blocked = false;  ///< waits because its output is not read
  std::string busy_with;        ///< the long task that the program has announced; empty if there is none
  std::string handles;          ///< the exception that the program is handling while it waits; untrusted; empty: none
  std::uint64_t live_bytes = 0, peak_live_bytes = 0, high_water_bytes = 0, resident_bytes = 0;  ///< of the arena
  std::int64_t read_at_ns = 0;              ///< time of the copy, as monotonic_ns()
  std::vector<OperationRecord> operations;  ///< in the order of their starts; times as monotonic_ns()
};

/// Returns what `page` contains now; nullopt if no process has called publish_to().
std::optional<RankSnapshot> read_rank_page(const RankPage& page);
/// Returns the page of process `pid` if it is a running rank of this user, else nullopt.
std::optional<RankSnapshot> find_rank_page(pid_t pid);
/// Returns the pages of all ranks of this user on this host, whichever launcher started them, sorted by job and rank.
std::vector<RankSnapshot> find_rank_pages();

}  // namespace lockstep::base::telemetry
