// Threads that run replicas with the caller's thread-local state. Private to nn/.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace lockstep::nn {

/// A fixed set of threads, which exist as long as this object: the first operation of each thread creates OpenMP
/// threads of its own, which would otherwise be created again in every run().
class ReplicaThreads {
 public:
  /// Starts `count` threads, so that run() can run `count` + 1 jobs at once.
  explicit ReplicaThreads(std::size_t count);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Runs job(0) on the caller's thread and job(1), ..., job(count - 1) on the other threads, with the caller's grad
  /// mode, autocast and other thread-local state of torch. Blocks until all jobs are done. Returns the exception of
  /// each job, or null. Not thread-safe.
  std::vector<std::exception_ptr> run(std::size_t count, const std::function<void(std::size_t)>& job);

 private:
  struct Worker {
    std::mutex mutex;  // guards task and stopping
    std::condition_variable condition;
    std::optional<std::function<void()>> task;
    bool stopping = false;
    std::thread thread;
  };
  static void run_worker(Worker& worker);
  void stop() noexcept;

  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace lockstep::nn
