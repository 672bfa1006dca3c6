// A queue that runs operations in order, on the threads that wait for them or on a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

/// A thread that waits for an operation checks this often whether the transport was aborted, whether a peer has ended,
/// and whether another thread runs the operations.
constexpr auto kAbortCheckInterval = std::chrono::milliseconds(20);

/// A foreground operation makes progress while a thread waits for it or for a later one. This has the lowest latency. A
/// background operation must make progress while this rank computes, so the engine's thread runs it and all operations
/// before it. The first background operation starts that thread.
///
/// Memory ordering: only the thread that holds advance_mutex_ calls an AdvanceFn, so an operation may pass from one
/// thread to another without further synchronization. QueuedOp::finish() is a release store and done() an acquire load
/// (see Pending): a caller that reads "done" reads the results of the operation. num_background_ changes under mutex_
/// and is also read without it, as a hint: a waiting thread that reads an old value at worst takes advance_mutex_ and
/// runs the operation itself, or polls once more. No data depends on it.
class ProgressEngine {
 public:
  /// Makes progress until the deadline; only a background operation may take longer. Returns true when the operation is
  /// finished. An exception becomes the error of the Pending.
  using AdvanceFn = std::function<bool(base::Deadline)>;

  ProgressEngine() = default;
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  /// Queues an operation; does not wait for it. One thread at a time.
  PendingPtr add(AdvanceFn advance_fn, bool is_background);
  /// Finishes all queued and later operations with `cause`. No AdvanceFn is called any more, but one that is running
  /// continues to its end. Must be called before the destructor. May be called from any thread; does not wait.
  void abort(const std::exception_ptr& cause);

 private:
  class QueuedOp;
  bool advance(base::Deadline deadline);
  void run();
  std::shared_ptr<QueuedOp> front() const;

  std::mutex advance_mutex_;  // held while an AdvanceFn runs; acquired before mutex_
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedOp>> items_;
  std::exception_ptr abort_cause_;
  bool stop_ = false;
  std::atomic<int> num_background_{0};  // the number of background operations in items_; changes under mutex_
  std::thread thread_;
};

}  // namespace lockstep::comm
