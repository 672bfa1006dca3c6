#include "lockstep/nn/replica_threads.h"

#include <ATen/ThreadLocalState.h>

namespace lockstep::nn {

ReplicaThreads::ReplicaThreads(std::size_t count) {
  workers_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      auto worker = std::make_unique<Worker>();
      worker->thread = std::thread([&started = *worker] { work(started); });
      workers_.push_back(std::move(worker));
    }
  } catch (...) {
    end();
    throw;
  }
}

ReplicaThreads::~ReplicaThreads() { end(); }

void ReplicaThreads::end() noexcept {
  for (const auto& worker : workers_) {
    const std::lock_guard lock(worker->mutex);
    worker->leaving = true;
    worker->changed.notify_all();
  }
  for (const auto& worker : workers_) worker->thread.join();  // bounded: it has no task, and was told to leave
}

void ReplicaThreads::work(Worker& worker) {
  std::unique_lock lock(worker.mutex);
  while (true) {
    // bounded: the destructor ends it
    worker.changed.wait(lock, [&] { return worker.task || worker.leaving; });
    if (!worker.task) return;
    lock.unlock();
    (*worker.task)();
    lock.lock();
    worker.task.reset();
    worker.changed.notify_all();
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
      const at::ThreadLocalStateGuard as_the_caller(state);
      guarded(i);
    };
    worker.changed.notify_all();
  }
  guarded(0);
  for (std::size_t i = 1; i < count; ++i) {
    Worker& worker = *workers_[i - 1];
    std::unique_lock lock(worker.mutex);
    // bounded: by the replica's own forward()
    worker.changed.wait(lock, [&] { return !worker.task; });
  }
  return thrown;
}

}  // namespace lockstep::nn
