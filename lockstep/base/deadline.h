// Deadlines on the monotonic clock for calls that block.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep::base {

/// The point in time at which a blocking call gives up. Every call that may block takes a Deadline. Clocks of different
/// hosts are never compared: a deadline is sent to another host as the remaining time.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Returns the deadline `limit` from now, or never() if `limit` exceeds ten years.
  template <typename Rep, typename Period>
  static Deadline in(std::chrono::duration<Rep, Period> limit) {
    if (limit > std::chrono::hours(24 * 3650)) return never();
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(limit));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  /// Returns a deadline that never expires, for waits that are bounded in another way. The caller states that bound in
  /// a comment.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  Clock::time_point when() const { return when_; }
  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= when_; }

  /// Returns the remaining time, never negative; milliseconds::max() for never().
  std::chrono::milliseconds remaining() const {
    if (is_never()) return std::chrono::milliseconds::max();
    return std::max(std::chrono::milliseconds(0), std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()));
  }
  /// Returns remaining() as a timeout for poll(2), capped at `cap` so that a polling loop can check other conditions.
  int poll_ms(std::chrono::milliseconds cap = std::chrono::minutes(1)) const {
    return static_cast<int>(std::min(remaining(), cap).count());
  }
  /// Return the earlier and the later of two deadlines.
  friend Deadline earlier(Deadline a, Deadline b) { return a.when_ < b.when_ ? a : b; }
  friend Deadline later(Deadline a, Deadline b) { return a.when_ < b.when_ ? b : a; }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

/// Waits until `ready()`, which is called under `lock`; returns false if it is still false at the deadline.
template <typename Condition, typename Lock, typename Ready>
bool wait_until(Condition& condition, Lock& lock, Deadline deadline, const Ready& ready) {
  if (!deadline.is_never()) return condition.wait_until(lock, deadline.when(), ready);
  // Neither condition.wait(), which requires the libstdc++ of g++ 12, newer than that of RHEL 9, nor wait_until() with
  // time_point::max(), which overflows.
  while (!condition.wait_until(lock, Deadline::Clock::now() + std::chrono::hours(24), ready)) {
  }
  return true;
}

/// Calls `done()` until it returns true, with pauses that double from 20 us to `longest_pause`; returns false if it is
/// still false at the deadline.
template <typename Done>
bool poll_until(Deadline deadline, std::chrono::microseconds longest_pause, const Done& done) {
  for (std::chrono::microseconds pause(20); !done(); pause = std::min(2 * pause, longest_pause)) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace lockstep::base
