// The clock that all processes of a host share.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::base {

/// Nanoseconds of the monotonic clock, which begins when the kernel does. 25 ns.
inline std::int64_t monotonic_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace lockstep::base
