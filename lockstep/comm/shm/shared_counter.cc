#include "lockstep/comm/shm/shared_counter.h"

#include "lockstep/base/monotonic.h"

namespace lockstep::comm::shm {

bool spin_until_reached(const SharedCounter& counter, std::uint32_t count, const SpinPolicy& policy) {
  for (int i = 0; i < policy.spins; ++i) {
    if (has_reached(counter, count)) return true;
    base::spin_pause();
  }
  constexpr int kYieldsPerLook = 8;  // at the clock
  std::int64_t end = 0;
  for (int i = 0; i < policy.yields; ++i) {
    if (has_reached(counter, count)) return true;
    if (i % kYieldsPerLook == 0) {
      const std::int64_t now = base::monotonic_ns();
      if (end == 0) end = now + kMaxYieldTime.count();
      if (now >= end) break;
    }
    base::yield_thread();
  }
  return has_reached(counter, count);
}

bool block_until_reached(const SharedCounter& counter, std::uint32_t count, base::Deadline deadline) {
  const std::uint32_t seen = counter.count.load(std::memory_order_seq_cst);  // see ControlBlocks::advance()
  if (has_reached(counter, count)) return true;
  base::futex_wait(counter.count, seen, deadline.remaining());
  return has_reached(counter, count);
}

}  // namespace lockstep::comm::shm
