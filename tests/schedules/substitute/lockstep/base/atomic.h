// Takes the place of lockstep/base/atomic.h in the sources that tests/schedules compiles: before and after each
// operation, the scheduler chooses which rank continues.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "tests/schedules/scheduler.h"

namespace lockstep::base {

/// std::atomic for ranks that are fibers of one thread. Every order counts as sequentially consistent.
template <typename T>
class Atomic {
 public:
  static constexpr bool is_always_lock_free = true;

  Atomic() noexcept = default;
  constexpr Atomic(T value) noexcept : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order = std::memory_order_seq_cst) const noexcept {
    return schedules::at_point([&] { return value_; });
  }
  void store(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    schedules::at_point([&] { return value_ = value; });
  }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) noexcept {
    return update([&](T) { return value; });
  }
  T fetch_add(T more, std::memory_order = std::memory_order_seq_cst) noexcept {
    return update([&](T old) { return static_cast<T>(old + more); });
  }
  T fetch_sub(T less, std::memory_order = std::memory_order_seq_cst) noexcept {
    return update([&](T old) { return static_cast<T>(old - less); });
  }
  T fetch_or(T bits, std::memory_order = std::memory_order_seq_cst) noexcept {
    return update([&](T old) { return static_cast<T>(old | bits); });
  }
  bool compare_exchange_strong(T& expected, T desired, std::memory_order = std::memory_order_seq_cst) noexcept {
    return schedules::at_point([&] {
      if (value_ != expected) {
        expected = value_;
        return false;
      }
      value_ = desired;
      return true;
    });
  }
  bool compare_exchange_weak(T& expected, T desired, std::memory_order = std::memory_order_seq_cst) noexcept {
    return compare_exchange_strong(expected, desired);
  }

  operator T() const noexcept { return load(); }
  T operator=(T value) noexcept {
    store(value);
    return value;
  }
  T operator++() noexcept { return static_cast<T>(fetch_add(1) + 1); }
  T operator--() noexcept { return static_cast<T>(fetch_sub(1) - 1); }
  T operator+=(T more) noexcept { return static_cast<T>(fetch_add(more) + more); }

 private:
  template <typename Change>
  T update(const Change& change) noexcept {
    return schedules::at_point([&] {
      const T old = value_;
      value_ = change(old);
      return old;
    });
  }
  T value_;
};

class Mutex {
 public:
  void lock() noexcept {
    while (!try_lock()) schedules::yield();
  }
  bool try_lock() noexcept {
    return schedules::at_point([&] { return !std::exchange(is_locked_, true); });
  }
  void unlock() noexcept {
    schedules::at_point([&] { return is_locked_ = false; });
  }

 private:
  bool is_locked_ = false;
};

class ConditionVariable {
 public:
  /// The time passes as soon as another fiber has run.
  template <typename Lock, typename Time, typename Predicate>
  bool wait_until(Lock& lock, const Time&, const Predicate& is_true) {
    if (is_true()) return true;
    lock.unlock();
    schedules::yield();
    lock.lock();
    return is_true();
  }
  void notify_all() noexcept { schedules::point(); }
};

inline void spin_pause() noexcept { schedules::yield(); }
inline void yield_thread() noexcept { schedules::yield(); }

inline void futex_wait(const Atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::milliseconds) noexcept {
  schedules::futex_wait(&word,
                        [&word, seen] { return schedules::without_points([&] { return word.load() == seen; }); });
}
inline void futex_wake_all(const Atomic<std::uint32_t>& word) noexcept { schedules::futex_wake_all(&word); }

}  // namespace lockstep::base
