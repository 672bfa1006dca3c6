// How an interpreter ends waits when the user presses Ctrl-C: its signal handlers only set a flag, which it must read.
#pragma once

namespace lockstep::comm::channel {

/// Returns true if this thread should stop waiting. It may run code of the interpreter.
using InterruptCheck = bool (*)();

/// From now on, waits of more than 100 ms call `check` every 100 ms on the thread that waits; null: they do not. If it
/// returns true, the wait ends with a CommError of kInterrupted, which closes its group.
void set_interrupt_check(InterruptCheck check);

/// Calls the check, if there is one.
bool is_interrupted();

}  // namespace lockstep::comm::channel
