// Handlers that turn SIGTERM and SIGUSR1 into a stop request.
#pragma once

namespace lockstep::comm {

/// Installs handlers for SIGTERM, SIGUSR1 and, unless the program or Python handles it, SIGINT. They only set a flag.
/// Before the first call these signals end the process as usual. Idempotent. May be called from any thread.
void install_stop_signal_handlers();
/// Returns whether one of the signals has arrived since install_stop_signal_handlers().
bool has_stop_signal() noexcept;

}  // namespace lockstep::comm
