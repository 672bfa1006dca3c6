// A counter that one rank advances and others wait for.
#pragma once

#include <atomic>
#include <cstdint>

#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// In shared memory, zeroed at first; only its owner writes it. A cache line: waiting for one disturbs no other, and
/// who waits for the count has what else is in the line.
struct alignas(64) SharedCounter {
  std::atomic<std::uint32_t> count{0};
  std::uint64_t key = 0;  ///< written before the count
  char data[48] = {};     ///< likewise
};
static_assert(sizeof(SharedCounter) == 64);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// How long to try before sleeping; sleeping and waking cost 25 us, a look at a line in cache 0.1 (2 cores of a virtual
/// EPYC).
struct SpinPolicy {
  int spins = 0;
  int yields = 0;
  /// For a host with a core for every rank.
  static SpinPolicy for_dedicated_cores() { return {2000, 200}; }
  /// Where ranks share cores: who spins keeps the other from coming, and who sleeps waits for a tick of the scheduler:
  /// 4 ranks on 2 busy cores met after 960 us with 400 yields, after 10 with this many.
  static SpinPolicy for_shared_cores() { return {20, 20000}; }
};

/// Wakes everybody who sleeps on it. A system call: whoever advanced it asks first whether anybody sleeps.
void wake_waiters(const SharedCounter& counter);

/// True when `signal` has reached `count`; counts wrap around.
inline bool has_reached(const SharedCounter& counter, std::uint32_t count) {
  return static_cast<std::int32_t>(counter.count.load(std::memory_order_acquire) - count) >= 0;
}
/// Spins, then yields. Whether it was reached.
bool spin_until_reached(const SharedCounter& counter, std::uint32_t count, const SpinPolicy& policy);
/// Sleeps until somebody wakes it, its count changes, or the deadline. Whether it was reached.
bool block_until_reached(const SharedCounter& counter, std::uint32_t count, base::Deadline deadline);

}  // namespace lockstep::comm
