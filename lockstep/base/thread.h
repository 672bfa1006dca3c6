// Starts and names threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::base {

/// The names of Lockstep's own threads begin with this: their CPU time does not count as work (launch/process).
inline constexpr const char* kOwnThreadPrefix = "lockstep-";

/// Names the calling thread kOwnThreadPrefix and `role`, which has at most six characters.
inline void name_own_thread(const char* role) {
  ::pthread_setname_np(::pthread_self(), (std::string(kOwnThreadPrefix) + role).c_str());
}

/// Starts a thread. Throws Error (kResource) where the system lets the process have no more.
template <typename Run>
std::thread start_thread(Run&& run) {
  try {
    return std::thread(std::forward<Run>(run));
  } catch (const std::system_error& error) {
    throw Error(Cause::kResource, std::string("cannot start a thread: ") + error.code().message(),
                "raise ulimit -u, or pids.max of the control group (docker run --pids-limit)");
  }
}

/// Starts a thread that blocks all signals, so that the kernel delivers them to the program's own threads. Throws as
/// start_thread().
template <typename Run>
std::thread start_thread_without_signals(Run&& run) {
  struct Masked {
    Masked() {
      sigset_t all;
      sigfillset(&all);
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Masked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } const masked;
  return start_thread(std::forward<Run>(run));
}

}  // namespace lockstep::base
