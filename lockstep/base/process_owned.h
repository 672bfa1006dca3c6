// What belongs to the process that made it, and not to a child made by fork().
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <utility>

namespace lockstep::base {

/// Tells an object of this process from its copy in a child made by fork(). Cheaper than getpid(), a system call.
class ForkGuard {
 public:
  ForkGuard() : forks_(num_forks_) {
    [[maybe_unused]] static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++num_forks_; });
  }
  bool is_copy_in_child() const { return num_forks_.load(std::memory_order_relaxed) != forks_; }

 private:
  inline static std::atomic<int> num_forks_{0};  // between the first process with a ForkGuard and this one
  const int forks_;
};

/// Makes an object whose destructor runs in this process only. A child made by fork() has a copy of the memory, but
/// none of the threads and no part in the job: destructors would wait for threads that do not exist, or tell the other
/// ranks that this process has left.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_process_owned(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [guard = ForkGuard()](T* object) {
    if (!guard.is_copy_in_child()) delete object;
  });
}

}  // namespace lockstep::base
