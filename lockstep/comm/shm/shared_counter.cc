#include "lockstep/comm/shm/shared_counter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep::comm::shm {
namespace {

/// Executes the instruction for spin-wait loops.
void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t* futex_word(const SharedCounter& counter) {
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint32_t>*>(&counter.count));
}

}  // namespace

void wake_waiters(const SharedCounter& counter) {
  ::syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool spin_until_reached(const SharedCounter& counter, std::uint32_t count, const SpinPolicy& policy) {
  for (int i = 0; i < policy.spins; ++i) {
    if (has_reached(counter, count)) return true;
    cpu_relax();
  }
  for (int i = 0; i < policy.yields; ++i) {
    if (has_reached(counter, count)) return true;
    ::sched_yield();
  }
  return has_reached(counter, count);
}

bool block_until_reached(const SharedCounter& counter, std::uint32_t count, base::Deadline deadline) {
  const std::uint32_t seen = counter.count.load(std::memory_order_seq_cst);  // see ControlBlocks::advance()
  if (has_reached(counter, count)) return true;
  const auto left = deadline.remaining().count();
  const timespec limit{static_cast<time_t>(left / 1000), static_cast<long>(left % 1000) * 1'000'000};
  // Not FUTEX_PRIVATE: other processes map the word. FUTEX_WAIT returns at once if the count is no longer `seen`.
  ::syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, seen, &limit, nullptr, 0);
  return has_reached(counter, count);
}

}  // namespace lockstep::comm::shm
