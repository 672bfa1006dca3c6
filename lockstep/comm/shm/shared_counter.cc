#include "lockstep/comm/shm/shared_counter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep::comm {
namespace {

/// Tells the core that this is a wait.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t* word_of(const Signal& signal) {
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint32_t>*>(&signal.count));
}

}  // namespace

void wake(const Signal& signal) { ::syscall(SYS_futex, word_of(signal), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool try_reach(const Signal& signal, std::uint32_t count, const Patience& patience) {
  for (int i = 0; i < patience.spins; ++i) {
    if (reached(signal, count)) return true;
    relax();
  }
  for (int i = 0; i < patience.yields; ++i) {
    if (reached(signal, count)) return true;
    ::sched_yield();
  }
  return reached(signal, count);
}

bool sleep_until(const Signal& signal, std::uint32_t count, base::Deadline deadline) {
  const std::uint32_t seen = signal.count.load(std::memory_order_seq_cst);  // see Boards::advance()
  if (reached(signal, count)) return true;
  const auto left = deadline.left().count();
  const timespec limit{static_cast<time_t>(left / 1000), static_cast<long>(left % 1000) * 1'000'000};
  // Not FUTEX_PRIVATE: others map the word elsewhere. It returns at once when the count is no longer `seen`.
  ::syscall(SYS_futex, word_of(signal), FUTEX_WAIT, seen, &limit, nullptr, 0);
  return reached(signal, count);
}

}  // namespace lockstep::comm
