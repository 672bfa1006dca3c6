#include "lockstep/comm/stop_signal.h"

#include <signal.h>

#include <atomic>

namespace lockstep::comm {
namespace {

std::atomic<bool> signalled{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // a handler sets it

}  // namespace

void catch_stop_signals() {
  static const bool once = [] {
    struct sigaction action{};
    action.sa_handler = [](int) { signalled.store(true); };
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGTERM, SIGUSR1}) ::sigaction(signal, &action, nullptr);
    return true;
  }();
  (void)once;
}

bool stop_signalled() noexcept { return signalled.load(std::memory_order_relaxed); }

}  // namespace lockstep::comm
