// Objects that belong to the process that made them: a child made by fork() does not destroy them.
#pragma once

#include <unistd.h>

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

}  // namespace lockstep::base
