// The time that a thread of a program spends in operations between ranks.
#pragma once

#include <cstdint>
#include <utility>

#include "lockstep/base/monotonic.h"
#include "lockstep/base/telemetry/flight_ring.h"

namespace lockstep::base::telemetry {

/// Adds up the time that the calling thread is in operations between ranks that it waits for: until other ranks arrive,
/// until data has been sent and received, and while this thread adds it up. What other threads wait for is not seen,
/// nor is what a device waits for.
class CommTime {
 public:
  /// Returns the sum of this thread in nanoseconds; intervals that have not ended are not included.
  static std::int64_t total_ns() noexcept {
    const std::int64_t ticks_passed = ticks() - start_.ticks, ns_passed = monotonic_ns() - start_.ns;
    const double rate = ticks_passed > 0 ? static_cast<double>(ns_passed) / static_cast<double>(ticks_passed) : 0;
    return static_cast<std::int64_t>(static_cast<double>(total_ticks_) * rate);
  }

  /// While it exists, other scopes of this thread do not count; if not `counts`, it does nothing. Its own time is what
  /// the caller adds, who has read the clock anyway: reading it twice takes 40 ns, a tenth of an all_reduce of 4 KB.
  class Operation {
   public:
    explicit Operation(bool counts) noexcept : outermost_(counts && !std::exchange(inside_, inside_ || counts)) {}
    ~Operation() {
      if (outermost_) inside_ = false;
    }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    /// False if it does nothing.
    bool counts() const noexcept { return outermost_; }
    void add(std::int64_t ticks) const noexcept {
      if (outermost_) total_ticks_ += ticks;
    }

   private:
    const bool outermost_;
  };

  /// Counts the time in which it exists.
  class Scope {
   public:
    explicit Scope(bool counts) noexcept : operation_(counts), begin_(operation_.counts() ? ticks() : 0) {}
    ~Scope() {
      if (begin_ != 0) operation_.add(ticks() - begin_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Operation operation_;
    const std::int64_t begin_;
  };

  /// While it exists, the time of this thread does not count: it computes with what it has received.
  class Pause {
   public:
    Pause() noexcept : begin_(inside_ ? ticks() : 0) {}
    ~Pause() {
      if (begin_ != 0) total_ticks_ -= ticks() - begin_;
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
  inline static const Start start_{telemetry::ticks(), monotonic_ns()};
  inline static constinit thread_local std::int64_t total_ticks_ = 0;
  inline static constinit thread_local bool inside_ = false;
};

}  // namespace lockstep::base::telemetry
