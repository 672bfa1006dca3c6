#include "lockstep/comm/channel/interrupt.h"

#include <atomic>

namespace lockstep::comm::channel {
namespace {

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check, std::memory_order_release); }

bool is_interrupted() {
  const InterruptCheck check = interrupt_check.load(std::memory_order_acquire);
  return check && check();
}

}  // namespace lockstep::comm::channel
