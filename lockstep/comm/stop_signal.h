// Handlers that turn SIGTERM, SIGUSR1 and SIGINT into a stop request.
#pragma once

namespace lockstep::comm {

/// Installs handlers for SIGTERM, SIGUSR1 and SIGINT, which only set a flag. SIGINT is left alone if the program
/// handles it; `replaces_interrupt` says that its handler is the default one of an interpreter, to which a second SIGINT
/// goes. Before the first call these signals end the process as usual, and they do so in children made by fork(), also
/// if they arrive while fork() runs. Idempotent. May be called from any thread.
void install_stop_signal_handlers(bool replaces_interrupt = false);
/// Returns whether one of the signals has arrived since install_stop_signal_handlers().
bool has_stop_signal() noexcept;

}  // namespace lockstep::comm
