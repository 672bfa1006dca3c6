// What an agent sees of a rank from outside: the page that it made for it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/health/rank_health.h"

namespace lockstep::launcher {

class RankWatch {
 public:
  /// `key` is for the rank alone to read.
  RankWatch(int rank, const job::JobKey& key);

  /// For the rank.
  int descriptor() const { return memory_.fd().get(); }

  /// To be called about once a second. `pid` is the process that was started. Of a rank that has not shown itself, or
  /// has left its world, it is only known whether it was stopped (T). One that a debugger holds (t) counts as one that
  /// gets on.
  job::Pulse pulse(pid_t pid, job::StandingStill::Clock::time_point now);

  /// The newest checkpoint that it knows to be durable, also after its end; 0: none.
  std::int64_t saved() const;
  /// What it has shown, also after its end.
  std::optional<base::RankSeen> seen() const { return base::look_at_page(memory_); }

  /// The process that shows itself; `otherwise` when none does.
  pid_t pid(pid_t otherwise) const;
  /// Between init() and the end of its world: it hears what the store says.
  bool in_world() const;

  /// Whoever waits in it for others looks into the store now.
  void tell_of_failure() { base::page_in(memory_).stop.store(1); }

 private:
  const int rank_;
  base::SharedMemory memory_;
  job::StandingStill beats_, progress_;
  std::uint64_t looks_ = 0;
};

}  // namespace lockstep::launcher
