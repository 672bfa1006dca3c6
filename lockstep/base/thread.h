// Starts threads that receive no signals.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace lockstep::base {

/// Starts a thread that blocks all signals, so that the kernel delivers them to the program's own threads.
template <typename Run>
std::thread start_thread_without_signals(Run&& run) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Run>(run));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace lockstep::base
