// A thread that does one thing after another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

/// Tasks run in the order of post(). The thread is made by the first post(): a program that uses no asynchronous
/// operation has none.
class SerialExecutor {
 public:
  SerialExecutor() = default;
  ~SerialExecutor();
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  /// Runs `task` on the thread; what it throws becomes the Pending's error.
  PendingPtr post(std::function<void()> task);

  /// True when nothing is queued or running: then a task may as well run on the caller's own thread.
  bool is_idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

  /// The lane whose thread this is; null on all other threads.
  static const SerialExecutor* current();

 private:
  struct Task {
    std::function<void()> task;
    PendingPtr pending;
  };
  void run_loop();

  std::atomic<std::size_t> unfinished_{0};
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lockstep::comm
