// SIGTERM and SIGUSR1 as a wish.
#pragma once

namespace lockstep::comm {

/// From now on these signals only set a flag; until then they end the process, as they always do. Idempotent.
void catch_stop_signals();
/// Whether one has come since.
bool stop_signalled() noexcept;

}  // namespace lockstep::comm
