// ProgressEngine: a queue that runs operations in order, on the threads that wait for them or on a thread of its own.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/base/atomic.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm::shm {

/// A thread that waits for an operation checks this often whether the transport was aborted, whether a peer has ended,
/// and whether another thread runs the operations.
constexpr auto kAbortCheckInterval = std::chrono::milliseconds(20);

/// A foreground operation makes progress while a thread waits for it or for a later one. This has the lowest latency. A
/// background operation must make progress while this rank computes, so the engine's thread runs it and all operations
/// before it. The first background operation starts that thread. While a background operation is queued, no other
/// thread runs an operation.
///
/// Threads: any thread may call every function except the destructor and may use the Pending of an operation; only one
/// thread at a time may call abort(). While a thread advances a foreground operation, another thread that
/// waits for an operation sleeps until its own is done, and add(), add_background() and try_now() block until the first
/// thread pauses, which it does every kAbortCheckInterval; since std::mutex is not fair, that may take several pauses.
/// abort() and Pending::done() never block.
///
/// Memory ordering: an operation runs with mutex_ held, or on the engine's thread between two critical sections of
/// mutex_, so it may pass from one thread to another without further synchronization. Pending::finish() is a release
/// store and done() an acquire load: a caller that reads "done" reads the results of the operation. abort() writes
/// abort_cause_ before it sets aborted_ (release), and abort_cause_ is read only after aborted_ was read as true
/// (acquire). num_background_ changes under mutex_ and is also read without it, as a hint: a waiting thread that reads
/// an old value checks it again under mutex_, or sleeps once more. No data depends on it.
class ProgressEngine {
 public:
  /// Makes progress until the deadline; only a background operation may take longer. Returns true when the operation is
  /// finished. An exception becomes the error of the Pending, with `name` as the operation if it is ArenaFull.
  using AdvanceFn = std::function<bool(base::Deadline)>;

  /// `name` is the name of the transport, for errors.
  explicit ProgressEngine(std::string name) : name_(std::move(name)) {}
  /// Blocks until no operation runs any more: an operation that another thread advances, or that the engine's thread
  /// runs, continues to its end or to the end of its interval. Queued operations must have been aborted, and no thread
  /// may begin to wait for an operation. Afterwards no AdvanceFn is called.
  ~ProgressEngine();
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;

  /// Queues a foreground operation. Advances it once, without waiting, if nothing is queued before it.
  PendingPtr add(AdvanceFn advance_fn);
  /// Queues a background operation.
  PendingPtr add_background(AdvanceFn advance_fn);

  /// Runs a foreground operation at once if nothing is queued: returns the result of `advance()`, which must not block.
  /// Does not allocate. Returns false without calling it if operations are queued or the engine was aborted. An
  /// operation that is not finished must be passed to add(). Throws what `advance` throws.
  template <typename Advance>
  bool try_now(const Advance& advance) {
    const std::lock_guard lock(mutex_);
    return items_.empty() && !aborted_.load(std::memory_order_relaxed) && advance();
  }

  /// Finishes all queued and later operations with `cause`. Does not wait: an operation that is running continues to
  /// its end or to the end of its interval, but no AdvanceFn is called any more after that. Only the first call has an
  /// effect. One thread at a time may call it.
  void abort(const std::exception_ptr& cause) noexcept;

 private:
  class QueuedOp;
  std::exception_ptr handled_error() const;
  void advance_until_done(const QueuedOp& target, base::Deadline deadline);
  void finish_front(const std::exception_ptr& error);
  void finish_aborted();
  void run_in_background();

  const std::string name_;
  base::Mutex mutex_;  // guards the members below, except the atomic ones; held while a foreground operation runs
  base::ConditionVariable changed_;
  std::deque<std::shared_ptr<QueuedOp>> items_;
  bool stop_ = false;
  base::Atomic<int> num_background_{0};  // the number of background operations in items_
  base::Atomic<bool> aborted_{false};
  std::exception_ptr abort_cause_;  // see "Memory ordering"
  std::thread thread_;
};

}  // namespace lockstep::comm::shm
