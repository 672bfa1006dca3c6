// Worker threads that wait for one task at a time.
#include "lockstep/nn/replica_threads.h"

#include <ATen/ThreadLocalState.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"

namespace lockstep::nn {

ReplicaThreads::ReplicaThreads(std::size_t count) {
  workers_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      auto worker = std::make_unique<Worker>();
      worker->thread = base::start_thread([&started = *worker] { run_worker(started); });
      workers_.push_back(std::move(worker));
    }
  } catch (...) {
    stop();
    throw;
  }
}

ReplicaThreads::~ReplicaThreads() { stop(); }

void ReplicaThreads::stop() noexcept {
  for (const auto& worker : workers_) {
    const std::lock_guard lock(worker->mutex);
    worker->stopping = true;
    worker->condition.notify_all();
  }
  for (const auto& worker : workers_) worker->thread.join();  // bounded: the worker has no task, and stopping is set
}

void ReplicaThreads::run_worker(Worker& worker) {
  std::unique_lock lock(worker.mutex);
  while (true) {
    // bounded: until run() sets a task or the destructor sets stopping
    base::wait_until(worker.condition, lock, base::Deadline::never(), [&] { return worker.task || worker.stopping; });
    if (!worker.task) return;
    lock.unlock();
    (*worker.task)();
    lock.lock();
    worker.task.reset();
    worker.condition.notify_all();
  }
}

std::vector<std::exception_ptr> ReplicaThreads::run(std::size_t count, const std::function<void(std::size_t)>& job) {
  std::vector<std::exception_ptr> thrown(count);
  const auto guarded = [&](std::size_t i) noexcept {
    try {
      job(i);
    } catch (...) {
      thrown[i] = std::current_exception();
    }
  };
  const at::ThreadLocalState state;
  for (std::size_t i = 1; i < count; ++i) {
    Worker& worker = *workers_[i - 1];
    const std::lock_guard lock(worker.mutex);
    worker.task = [&state, &guarded, i] {
      const at::ThreadLocalStateGuard caller_state(state);
      guarded(i);
    };
    worker.condition.notify_all();
  }
  guarded(0);
  for (std::size_t i = 1; i < count; ++i) {
    Worker& worker = *workers_[i - 1];
    std::unique_lock lock(worker.mutex);
    // bounded: by the duration of the replica's forward()
    base::wait_until(worker.condition, lock, base::Deadline::never(), [&] { return !worker.task; });
  }
  return thrown;
}

}  // namespace lockstep::nn
