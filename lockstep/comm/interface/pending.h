// The end of an operation that has begun: waited for by one side, announced by the other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "lockstep/base/deadline.h"

namespace lockstep::comm {

/// finish() may come from any thread, once; what comes later is ignored, so that an abort and the real end may race. A
/// transport without threads of its own derives from it: there whoever waits does the work.
///
/// An operation on a GPU's tensors may be done on the host, which has put it on its way, and not yet on the GPU: then
/// device_completion() announces the end.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Announces the end; with `error` the operation failed.
  void finish(std::exception_ptr error = nullptr);

  /// Does what can be done without waiting.
  virtual bool done() { return is_finished(); }
  /// True when it is done, false at the deadline. Does not throw the operation's error.
  virtual bool wait_until(base::Deadline deadline);
  /// The error, once done; null when there is none.
  std::exception_ptr error() const { return error_; }

  /// Once this is done without error: the end on the device; null when there is nothing more to come. It keeps the
  /// operation's tensors alive.
  virtual std::shared_ptr<Pending> device_completion() { return nullptr; }
  /// For what device_completion() has returned: what this thread puts on its current stream from now on comes after the
  /// operation. Does not wait.
  virtual void order() {}

 protected:
  bool is_finished() const { return done_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> done_{false};
  std::mutex mutex_;  // guards the change of done_ and error_
  std::condition_variable changed_;
  std::exception_ptr error_;
};

using PendingPtr = std::shared_ptr<Pending>;

/// One that is done already.
PendingPtr make_finished_pending();

}  // namespace lockstep::comm
