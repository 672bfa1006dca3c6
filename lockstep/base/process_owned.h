// What belongs to the process that made it, and not to a child made by fork().
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <utility>

namespace lockstep::base {

/// Makes an object whose destructor runs in this process only. A child made by fork() has a copy of the memory, but
/// none of the threads and no part in the job: destructors would wait for threads that do not exist, or tell the other
/// ranks that this process has left.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_process_owned(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [owner = ::getpid()](T* object) {
    if (::getpid() == owner) delete object;
  });
}

/// Whether this process is a child, made by fork() after a ForkGuard.
class ForkGuard {
 public:
  ForkGuard() {
    [[maybe_unused]] static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { is_child_.store(true, std::memory_order_relaxed); });
  }
  bool is_child() const { return is_child_.load(std::memory_order_relaxed); }

 private:
  inline static std::atomic<bool> is_child_{false};
};

}  // namespace lockstep::base
