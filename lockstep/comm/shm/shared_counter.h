// A counter that one rank advances and others wait for.
#pragma once

#include <atomic>
#include <cstdint>

#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// In shared memory, zeroed at first; only its owner writes it. A cache line: waiting for one disturbs no other, and
/// who waits for the count has what else is in the line.
struct alignas(64) Signal {
  std::atomic<std::uint32_t> count{0};
  std::uint64_t key = 0;  ///< written before the count
  char data[48] = {};     ///< likewise
};
static_assert(sizeof(Signal) == 64);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// How long to try before sleeping; sleeping and waking cost 25 us, a look at a line in cache 0.1 (2 cores of a virtual
/// EPYC).
struct Patience {
  int spins = 0;
  int yields = 0;
  /// For a host with a core for every rank.
  static Patience ample() { return {2000, 200}; }
  /// Where ranks share cores: who spins keeps the other from coming, and who sleeps waits for a tick of the scheduler:
  /// 4 ranks on 2 busy cores met after 960 us with 400 yields, after 10 with this many.
  static Patience crowded() { return {20, 20000}; }
};

/// Wakes everybody who sleeps on it. A system call: whoever advanced it asks first whether anybody sleeps.
void wake(const Signal& signal);

/// True when `signal` has reached `count`; counts wrap around.
inline bool reached(const Signal& signal, std::uint32_t count) {
  return static_cast<std::int32_t>(signal.count.load(std::memory_order_acquire) - count) >= 0;
}
/// Spins, then yields. Whether it was reached.
bool try_reach(const Signal& signal, std::uint32_t count, const Patience& patience);
/// Sleeps until somebody wakes it, its count changes, or the deadline. Whether it was reached.
bool sleep_until(const Signal& signal, std::uint32_t count, base::Deadline deadline);

}  // namespace lockstep::comm
