// How an interpreter ends waits when the user presses Ctrl-C: its signal handlers only set a flag, which it must read.
#pragma once

#include <atomic>

namespace lockstep::comm::channel {

/// Returns true if this thread should stop waiting. It may run code of the interpreter.
using InterruptCheck = bool (*)();

inline std::atomic<InterruptCheck> interrupt_check{nullptr};

/// From now on, waits of more than 100 ms call `check` every 100 ms on the thread that waits; null: they do not. If it
/// returns true, the wait ends with a CommError of kInterrupted, which closes its group.
inline void set_interrupt_check(InterruptCheck check) { interrupt_check.store(check, std::memory_order_release); }

/// Calls the check, if there is one.
inline bool is_interrupted() {
  const InterruptCheck check = interrupt_check.load(std::memory_order_acquire);
  return check && check();
}

}  // namespace lockstep::comm::channel
