// Threads that run replicas beside the caller, as if they were the caller. Private to nn/.
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

/// They live as long as this: a thread's own OpenMP threads, which its first operation makes, would otherwise be made
/// again each time.
class ReplicaThreads {
 public:
  /// For this many jobs at once beside the caller's.
  explicit ReplicaThreads(std::size_t count);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Runs job(0) on the caller's thread and job(1), ..., job(count - 1) on others, with the caller's grad mode,
  /// autocast and other thread-local state of torch. Returns when all are done, with what each threw. One thread calls
  /// it at a time.
  std::vector<std::exception_ptr> run(std::size_t count, const std::function<void(std::size_t)>& job);

 private:
  struct Worker {
    std::mutex mutex;  // guards task and leaving
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
