#include "lockstep/comm/stop_signal.h"

#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>

namespace lockstep::comm {
namespace {

std::atomic<bool> stop_signal_received{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

struct StopSignal {
  int number;
  struct sigaction before{};  // what the process did with it
};

std::atomic<bool> is_installed{false};
std::array<StopSignal, 3> stop_signals = {StopSignal{SIGTERM}, StopSignal{SIGUSR1}, StopSignal{SIGINT}};
thread_local sigset_t mask_before_fork;

void on_stop_signal(int number) {
  stop_signal_received.store(true);
  const StopSignal& interrupt = stop_signals.back();
  if (number == interrupt.number && interrupt.before.sa_handler != SIG_DFL)
    ::sigaction(number, &interrupt.before, nullptr);
}

/// Blocks the signals, so that none reaches the child before it has its own handling.
void before_fork() {
  sigset_t set;
  sigemptyset(&set);
  for (const StopSignal& signal : stop_signals) sigaddset(&set, signal.number);
  ::pthread_sigmask(SIG_BLOCK, &set, &mask_before_fork);
}

void after_fork() { ::pthread_sigmask(SIG_SETMASK, &mask_before_fork, nullptr); }

void after_fork_in_child() {
  for (const StopSignal& signal : stop_signals) {
    struct sigaction current{};
    if (::sigaction(signal.number, nullptr, &current) == 0 && current.sa_handler == on_stop_signal)
      ::sigaction(signal.number, &signal.before, nullptr);
  }
  stop_signal_received.store(false);
  is_installed.store(false);
  after_fork();
}

}  // namespace

void install_stop_signal_handlers(bool replaces_interrupt) {
  if (is_installed.exchange(true)) return;
  [[maybe_unused]] static const int registered = ::pthread_atfork(before_fork, after_fork, after_fork_in_child);
  struct sigaction action{};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (StopSignal& signal : stop_signals) {
    ::sigaction(signal.number, nullptr, &signal.before);
    if (signal.number != SIGINT || signal.before.sa_handler == SIG_DFL || replaces_interrupt)
      ::sigaction(signal.number, &action, nullptr);
  }
}

bool has_stop_signal() noexcept { return stop_signal_received.load(std::memory_order_relaxed); }

}  // namespace lockstep::comm
