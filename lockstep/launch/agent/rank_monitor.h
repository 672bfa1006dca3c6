// What an agent sees of a rank from outside: the page that it made for it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/job_key.h"

namespace lockstep::launcher {

class RankMonitor {
 public:
  /// `key` is for the rank alone to read.
  RankMonitor(int rank, const job::JobKey& key);

  /// For the rank.
  int descriptor() const { return memory_.fd().get(); }

  /// To be called about once a second. `pid` is the process that was started. Of a rank that has not shown itself, or
  /// has left its world, it is only known whether it was stopped (T). One that a debugger holds (t) counts as one that
  /// gets on.
  job::RankHealth pulse(pid_t pid, job::StallTimer::Clock::time_point now);

  /// The newest checkpoint that it knows to be durable, also after its end; 0: none.
  std::int64_t saved() const;
  /// What it has shown, also after its end.
  std::optional<base::RankSnapshot> seen() const { return base::read_rank_page(memory_); }

  /// The process that shows itself; `otherwise` when none does.
  pid_t pid(pid_t fallback) const;
  /// Between init() and the end of its world: it hears what the store says.
  bool is_in_world() const;

  /// Whoever waits in it for others looks into the store now.
  void notify_failure() { base::rank_page_in(memory_).stop_requested.store(1); }

 private:
  const int rank_;
  base::SharedMemory memory_;
  job::StallTimer beat_timer_, progress_timer_;
  std::uint64_t polls_ = 0;
};

}  // namespace lockstep::launcher
