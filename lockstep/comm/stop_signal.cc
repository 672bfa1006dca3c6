#include "lockstep/comm/stop_signal.h"

#include <signal.h>

#include <atomic>

namespace lockstep::comm {
namespace {

std::atomic<bool> stop_signal_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

}  // namespace

void install_stop_signal_handlers() {
  static const bool once = [] {
    struct sigaction action{};
    action.sa_handler = [](int) { stop_signal_received.store(true); };
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGTERM, SIGUSR1}) ::sigaction(signal, &action, nullptr);
    struct sigaction interrupt{};
    if (::sigaction(SIGINT, nullptr, &interrupt) == 0 && interrupt.sa_handler == SIG_DFL)
      ::sigaction(SIGINT, &action, nullptr);
    return true;
  }();
  (void)once;
}

bool has_stop_signal() noexcept { return stop_signal_received.load(std::memory_order_relaxed); }

}  // namespace lockstep::comm
