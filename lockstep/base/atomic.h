// What threads and processes synchronize with: atomic variables, the futex calls that wait for them, and mutexes. The
// shared-memory core uses them by these names alone, so that a test can put a scheduler in their place
// (tests/schedules).
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace lockstep::base {

template <typename T>
using Atomic = std::atomic<T>;
using Mutex = std::mutex;
using ConditionVariable = std::condition_variable;
static_assert(sizeof(Atomic<std::uint32_t>) == sizeof(std::uint32_t));

/// Executes the instruction for spin-wait loops.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Lets other threads run: sched_yield().
inline void yield_thread() noexcept { ::sched_yield(); }

/// Blocks while `word` is `seen`, until futex_wake_all() or for `limit`; may return early. The processes that map the
/// word may use it at different addresses. Orders no memory accesses: the caller loads the word again.
inline void futex_wait(const Atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::milliseconds limit) noexcept {
  const auto left = limit.count();
  const timespec timeout{static_cast<time_t>(left / 1000), static_cast<long>(left % 1000) * 1'000'000};
  // Not FUTEX_PRIVATE: other processes map the word.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
/// Wakes all threads that block on `word`. A system call.
inline void futex_wake_all(const Atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lockstep::base
