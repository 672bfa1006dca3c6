// Decides whether a failed job is restarted, after which pause and on which hosts, from the ends of its previous
// generations.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher::supervise {

/// Determines which hosts may be used. Identifies hosts by their numbers, from 0. Has no clock: callers pass the time.
class HostBackoff {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit HostBackoff(std::size_t num_hosts) : hosts_(num_hosts) {}

  /// Makes `host` unavailable for its next backoff time.
  void record_failure(std::size_t host, Time now);
  /// Call it when a job has made progress on `host`. Resets the backoff time of the host to 10 s.
  void record_success(std::size_t host) { hosts_.at(host) = {}; }
  /// Returns the hosts that may be used at `now`, in ascending order.
  std::vector<std::size_t> available(Time now) const;
  /// Returns the time from which `count` hosts may be used. `count` must not exceed the number of hosts.
  Time when_available(std::size_t count) const;

 private:
  struct Backoff {
    Time until{};
    std::chrono::seconds last{0};  // the last backoff time; 0: the host has not failed
  };
  std::vector<Backoff> hosts_;
};

/// Returns whether a restart may succeed. Returns false for failures that a user must fix, that would happen again, or
/// that a user requested. Pure.
bool is_restartable(const Verdict& verdict);

/// The facts about a generation that Restarts needs besides the verdict.
struct Attempt {
  bool started = true;                 ///< its ranks were started
  std::int64_t newest_checkpoint = 0;  ///< number of the newest checkpoint that its ranks have reported; 0: none
  std::chrono::milliseconds duration{0};
};

/// Counts restarts and checks for progress between them. Has no clock and does not block.
class Restarts {
 public:
  /// Allows at most `max_restarts`. The first pause is `first_pause`; it doubles up to 60 s and is reset by progress.
  Restarts(int max_restarts, std::chrono::milliseconds first_pause)
      : max_restarts_(max_restarts), first_pause_(first_pause), pause_(first_pause) {}

  /// Call it when a generation has ended with `verdict`. Returns the pause before the next generation, or nullopt if
  /// there is no restart: the verdict is not restartable; all restarts are used, which is appended to its detail; or
  /// three restarts in a row produced no newer checkpoint, in which case its cause becomes kNoProgress.
  std::optional<std::chrono::milliseconds> next(const Attempt& attempt, Verdict& verdict);

  /// Returns the number of restarts so far, which is the generation of the next start.
  int num_restarts() const { return num_restarts_; }
  /// Returns the newest checkpoint of all generations; 0 if there is none.
  std::int64_t newest_checkpoint() const { return newest_checkpoint_; }
  /// Returns whether the last generation made progress: it produced a newer checkpoint, or it took at least ten minutes
  /// and the program has never reported a checkpoint, because it saves in its own way.
  bool made_progress() const { return made_progress_; }

 private:
  void record(const Attempt& attempt);

  const int max_restarts_;
  const std::chrono::milliseconds first_pause_;
  std::chrono::milliseconds pause_;  // the next pause
  int num_restarts_ = 0;
  int without_progress_ = 0;  // restarts in a row without progress
  std::int64_t newest_checkpoint_ = 0;
  bool made_progress_ = false;
};

}  // namespace lockstep::launcher::supervise
