// The time that the threads of a program spend in operations between ranks.
#pragma once

#include <atomic>
#include <cstdint>

#include "lockstep/base/monotonic.h"
#include "lockstep/base/telemetry/flight_ring.h"

namespace lockstep::base::telemetry {

/// Adds up the time that threads of the program, not those that work in the background, are in an operation that they
/// wait for: until other ranks arrive, until data has been sent and received, and while this thread adds it up. Two
/// threads at a time count twice. Waits that a device makes are not seen. All functions are thread-safe.
class CommTime {
 public:
  /// Returns the sum since the process started, in nanoseconds; intervals that have not ended are not included.
  static std::int64_t total_ns() noexcept {
    const std::int64_t ticks_passed = ticks() - start_.ticks, ns_passed = monotonic_ns() - start_.ns;
    const double rate = ticks_passed > 0 ? static_cast<double>(ns_passed) / static_cast<double>(ticks_passed) : 0;
    return static_cast<std::int64_t>(static_cast<double>(total_ticks_.load(std::memory_order_relaxed)) * rate);
  }

  /// Counts while it exists, once if several of a thread do. If not `counts`, it does nothing.
  class Scope {
   public:
    explicit Scope(bool counts) noexcept : outermost_(counts && !inside_) {
      if (outermost_) inside_ = true, begin_ = ticks();
    }
    ~Scope() {
      if (outermost_) add(ticks() - begin_), inside_ = false;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool outermost_;
    std::int64_t begin_ = 0;
  };

  /// While it exists, a Scope of this thread does not count: the thread computes with what it has received.
  class Pause {
   public:
    Pause() noexcept : begin_(inside_ ? ticks() : 0) {}
    ~Pause() {
      if (begin_ != 0) add(begin_ - ticks());
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    const std::int64_t begin_;
  };

 private:
  struct Start {
    std::int64_t ticks, ns;
  };
  static void add(std::int64_t passed) noexcept { total_ticks_.fetch_add(passed, std::memory_order_relaxed); }
  inline static const Start start_{telemetry::ticks(), monotonic_ns()};
  inline static std::atomic<std::int64_t> total_ticks_{0};
  inline static constinit thread_local bool inside_ = false;
};

}  // namespace lockstep::base::telemetry
