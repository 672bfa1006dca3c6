// Handlers that turn SIGTERM, SIGUSR1 and SIGINT into a stop request.
#pragma once

namespace lockstep::comm {

/// Installs handlers for SIGTERM, SIGUSR1 and SIGINT, which only set a flag. The program's own handler of SIGINT stays,
/// unless `replaces_interrupt`: then it is the default one of an interpreter, which gets the second SIGINT. Before the
/// first call these signals end the process as usual, and they do so in children made by fork(), also if they arrive
/// while fork() runs. Idempotent. May be called from any thread.
void install_stop_signal_handlers(bool replaces_interrupt = false);
/// Returns whether one of the signals has arrived since install_stop_signal_handlers().
bool has_stop_signal() noexcept;

}  // namespace lockstep::comm
