// A counter in shared memory that one rank advances and other ranks wait for.
#pragma once

#include <chrono>
#include <cstdint>

#include "lockstep/base/atomic.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm::shm {

/// Zeroed at first; only its owner writes it. It fills a cache line, so waiting for one counter does not slow down
/// another, and a load of the count also brings `key` and `data` into the cache.
///
/// Memory ordering: the owner writes `key` and `data` (and any other memory) and then stores `count` (release or
/// stronger). has_reached() loads `count` with acquire: when it returns true, the caller reads the `key`, `data` and
/// other memory that the owner wrote before it stored that count or an earlier one. The owner must not change `key` or
/// `data` until the readers of the current count have confirmed that they are done (see control_block.h).
/// The futex system calls order nothing: a thread that wakes up loads the count again.
struct alignas(64) SharedCounter {
  base::Atomic<std::uint32_t> count{0};
  std::uint64_t key = 0;
  char data[48] = {};
};
static_assert(sizeof(SharedCounter) == 64);
static_assert(base::Atomic<std::uint32_t>::is_always_lock_free);

/// How long a thread polls before it sleeps. Sleeping and waking take 25 us, a load of a line in cache 0.1 us (measured
/// on 2 cores of a virtual EPYC).
struct SpinPolicy {
  int spins = 0;   ///< polls with a pause instruction in between
  int yields = 0;  ///< polls with a sched_yield() in between
  /// For a host with at least one core per rank.
  static SpinPolicy for_dedicated_cores() { return {2000, 200}; }
  /// For ranks that share cores. A rank that spins keeps its peer from running, and a rank that sleeps waits for a tick
  /// of the scheduler: 4 ranks on 2 busy cores synchronized in 960 us with 400 yields, in 10 us with this many.
  static SpinPolicy for_shared_cores() { return {20, 20000}; }
};

/// A thread yields no longer than this, about: beside one that computes, each sched_yield() takes milliseconds.
inline constexpr std::chrono::nanoseconds kMaxYieldTime = std::chrono::milliseconds(50);

/// Returns true if `counter` has reached `count`. Counts wrap around. An acquire load.
inline bool has_reached(const SharedCounter& counter, std::uint32_t count) {
  return static_cast<std::int32_t>(counter.count.load(std::memory_order_acquire) - count) >= 0;
}
/// Spins and then yields, as often as `policy` allows and for kMaxYieldTime at most. Returns true if the count was
/// reached.
bool spin_until_reached(const SharedCounter& counter, std::uint32_t count, const SpinPolicy& policy);
/// Sleeps until it is woken, the count changes, or the deadline. Returns true if the count was reached. May return
/// early.
bool block_until_reached(const SharedCounter& counter, std::uint32_t count, base::Deadline deadline);

}  // namespace lockstep::comm::shm
