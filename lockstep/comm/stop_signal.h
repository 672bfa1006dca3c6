// SIGTERM and SIGUSR1 as a wish.
#pragma once

namespace lockstep::comm {

/// From now on these signals only set a flag; until then they end the process, as they always do. Idempotent.
void install_stop_signal_handlers();
/// Whether one has come since.
bool has_stop_signal() noexcept;

}  // namespace lockstep::comm
