// SerialExecutor: a thread that runs tasks one after another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm::channel {

/// Runs tasks in the order of post(). The first post() starts the thread, so a program without asynchronous operations
/// has no such thread. Any thread may call post(). The destructor runs the queued tasks and blocks until they have
/// finished.
class SerialExecutor {
 public:
  ~SerialExecutor();

  /// Queues `task`. The Pending is done when the task has run; an exception that it throws becomes the Pending's error.
  PendingPtr post(std::function<void()> task);

  /// Returns true if no task is queued or running; then the caller may run its task on its own thread instead. The load
  /// has acquire order: if it returns true, the effects of all finished tasks are visible.
  bool is_idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

  /// Returns the executor whose thread calls this; null on all other threads.
  static const SerialExecutor* current();

 private:
  struct Task {
    std::function<void()> task;
    PendingPtr pending;
  };
  void run_loop();

  std::atomic<std::size_t> unfinished_{0};
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep::comm::channel
