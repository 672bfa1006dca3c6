// Starts threads that receive no signals, and names threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <thread>
#include <utility>

namespace lockstep::base {

/// The names of Lockstep's own threads begin with this: their CPU time does not count as work (launch/process).
inline constexpr const char* kOwnThreadPrefix = "lockstep-";

/// Names the calling thread kOwnThreadPrefix and `role`, which has at most six characters.
inline void name_own_thread(const char* role) {
  ::pthread_setname_np(::pthread_self(), (std::string(kOwnThreadPrefix) + role).c_str());
}

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
