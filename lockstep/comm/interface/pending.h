// Pending: the completion of an operation that has started.
#pragma once

#include <exception>
#include <memory>

#include "lockstep/base/atomic.h"
#include "lockstep/base/deadline.h"

namespace lockstep::comm::inline interface {

/// The completion of an operation. The side that runs the operation calls finish(); any number of threads may wait.
///
/// Any thread may call finish(). Only the first call has an effect, so an abort may race with the regular completion.
/// finish() stores the done flag with release order and done() loads it with acquire order: after done() or
/// wait_until() has returned true, the writes that preceded finish() and the error are visible.
///
/// A transport without threads of its own derives from Pending and runs the operation in the thread that waits.
///
/// An operation on GPU tensors may be done on the host, which has enqueued it, before it is done on the GPU. Then
/// device_completion() represents the completion on the GPU.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Marks the operation as done; `error` means that it failed.
  void finish(std::exception_ptr error = nullptr);

  /// Returns whether the operation is done. A derived class first does the work that it can do without blocking.
  virtual bool done() { return is_finished(); }
  /// Blocks until the operation is done (returns true) or until the deadline (returns false). Does not throw the
  /// operation's error.
  virtual bool wait_until(base::Deadline deadline);
  /// Returns the error of an operation that is done; null if there is none.
  std::exception_ptr error() const { return error_; }

  /// After this Pending is done without an error: returns the completion on the device, or null if there is nothing
  /// left to wait for. The returned object keeps the operation's tensors alive.
  virtual std::shared_ptr<Pending> device_completion() { return nullptr; }
  /// For the result of device_completion(): makes the current stream of this thread wait for the operation. Does not
  /// block the CPU.
  virtual void block_current_stream() {}

 protected:
  bool is_finished() const { return done_.load(std::memory_order_acquire); }
  /// Sleeps until finish() was called (returns true) or until the deadline (returns false).
  bool sleep_until(base::Deadline deadline);

 private:
  base::Atomic<bool> done_{false};
  base::Mutex mutex_;  // guards the change of done_ and error_
  base::ConditionVariable changed_;
  std::exception_ptr error_;
};

using PendingPtr = std::shared_ptr<Pending>;

/// Returns a Pending that is done already.
PendingPtr make_finished_pending();

}  // namespace lockstep::comm::inline interface
