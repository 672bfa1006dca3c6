// Monitors one rank from outside, through the shared page that the agent creates for it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/job_key.h"

namespace lockstep::launcher {

/// Owns the page of one rank. Used by one thread; the rank writes the page concurrently, and its values are not
/// trusted.
class RankMonitor {
 public:
  /// Creates the page and stores `key` in it, which only the rank can read.
  RankMonitor(int rank, const job::JobKey& key);

  /// The descriptor of the page, to be passed to the rank.
  int descriptor() const { return memory_.fd().get(); }

  /// Samples the page; to be called about once a second. `pid` is the process that was started. For a rank that has not
  /// joined its world, or has left it, only whether it is stopped (T) is known. A rank that a debugger holds (t) counts
  /// as making progress.
  job::RankHealth health(pid_t pid, job::StallTimer::Clock::time_point now);

  /// The newest checkpoint that the rank has reported as durable, also after its exit; 0: none.
  std::int64_t durable_checkpoint() const;
  /// The rank's published snapshot, also after its exit.
  std::optional<base::RankSnapshot> snapshot() const { return base::read_rank_page(memory_); }

  /// The pid that the page names; `fallback` if it names none.
  pid_t pid(pid_t fallback) const;
  /// True between init() and the end of the rank's world, while it reads the store.
  bool is_in_world() const;

  /// Makes waiting operations of the rank check the store for a failure now.
  void notify_failure() { base::rank_page_in(memory_).stop_requested.store(1); }

 private:
  const int rank_;
  base::SharedMemory memory_;
  job::StallTimer beat_timer_, progress_timer_;
  std::uint64_t polls_ = 0;
};

}  // namespace lockstep::launcher
