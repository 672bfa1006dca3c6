// The time that a thread of a program spends in operations between ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/base/monotonic.h"
#include "lockstep/base/telemetry/flight_ring.h"

namespace lockstep::base::telemetry {

/// Adds up the time that the calling thread is in operations between ranks that it waits for: until other ranks arrive,
/// until data has been sent and received, and while this thread copies it or adds it up. What other threads wait for is
/// not seen, nor is what a device waits for.
class CommTime {
 public:
  /// Returns the sum of this thread in nanoseconds; intervals that have not ended are not included. Never falls.
  static std::int64_t total_ns() noexcept {
    const std::int64_t ticks_passed = ticks() - start_.ticks, ns_passed = monotonic_ns() - start_.ns;
    const double rate = ticks_passed > 0 ? static_cast<double>(ns_passed) / static_cast<double>(ticks_passed) : 0;
    const std::int64_t growth = total_ticks_ - std::exchange(converted_ticks_, total_ticks_);
    return converted_ns_ += std::max<std::int64_t>(0, static_cast<std::int64_t>(static_cast<double>(growth) * rate));
  }

  /// Adds an interval whose length the caller knows: reading the clock twice takes 40 ns, a tenth of an all_reduce of
  /// 4 KB. Within a Scope, which counts it already, it does nothing.
  static void add(std::int64_t ticks) noexcept {
    if (!inside_) total_ticks_ += ticks;
  }

  /// Counts the time in which it exists, once if several of a thread do. If not `counts`, it does nothing.
  class Scope {
   public:
    explicit Scope(bool counts) noexcept : begin_(counts && !inside_ ? ticks() : 0) {
      if (begin_ != 0) inside_ = true;
    }
    ~Scope() {
      if (begin_ == 0) return;
      total_ticks_ += ticks() - begin_;
      inside_ = false;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::int64_t begin_;
  };

  /// While it exists, a Scope of this thread does not count: the thread computes with what it has received. A Scope
  /// inside it counts again.
  class Pause {
   public:
    Pause() noexcept : begin_(inside_ ? ticks() : 0) { inside_ = false; }
    ~Pause() {
      if (begin_ == 0) return;
      total_ticks_ -= ticks() - begin_;
      inside_ = true;
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
  inline static constinit thread_local std::int64_t converted_ticks_ = 0, converted_ns_ = 0;  // at the last total_ns()
  inline static constinit thread_local bool inside_ = false;
};

}  // namespace lockstep::base::telemetry
