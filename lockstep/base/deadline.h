// A point on the monotonic clock at which a wait gives up.
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::base {

/// Every call that may wait takes one. Clocks of two hosts are never compared: a deadline that travels does so as the
/// time that remains.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// The deadline `limit` from now. Limits of more than ten years never expire.
  template <typename Rep, typename Period>
  static Deadline in(std::chrono::duration<Rep, Period> limit) {
    if (limit > std::chrono::hours(24 * 3650)) return never();
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(limit));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  /// For waits that something else bounds; say what, where you use it.
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  Clock::time_point when() const { return when_; }
  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= when_; }

  /// Time that remains, never negative.
  std::chrono::milliseconds remaining() const {
    if (is_never()) return std::chrono::milliseconds::max();
    return std::max(std::chrono::milliseconds(0), std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()));
  }
  /// left() as poll(2) takes it: at most `cap`, so that a loop can look around in between.
  int poll_ms(std::chrono::milliseconds cap = std::chrono::minutes(1)) const {
    return static_cast<int>(std::min(remaining(), cap).count());
  }
  /// The earlier of the two.
  friend Deadline earlier(Deadline a, Deadline b) { return a.when_ < b.when_ ? a : b; }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace lockstep::base
