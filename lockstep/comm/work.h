// Work: the handle of an operation that runs asynchronously.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm::channel {
class SerialExecutor;
class DeadlockDetector;
}  // namespace lockstep::comm::channel

namespace lockstep::comm {

/// An operation in progress. Work is a small value; copies refer to the same operation.
///
/// The operation keeps its tensors alive. The caller must not read or write them before the operation is done.
/// Destroying a Work does not end its operation. The collective operations of one group end in the order in which they
/// started.
class Work {
 public:
  /// Blocks until the operation is done or its own deadline has passed. Throws the operation's error: DesyncError,
  /// PeerLostError or TimeoutError.
  void wait();
  /// Like wait(), but throws a TimeoutError at `deadline` if that is earlier. The operation continues, and the caller
  /// may wait for it again.
  void wait(base::Deadline deadline);

  bool done() const { return pending_->done(); }
  /// Returns the error of a finished operation. Returns null if there is none or the operation is not done.
  std::exception_ptr error() const { return pending_->done() ? pending_->error() : nullptr; }

  /// For Group: operation `label` of `rank`, whose end `pending` reports, queued on `executor`.
  Work(PendingPtr pending, std::string label, int rank, std::shared_ptr<channel::DeadlockDetector> deadlock_detector,
       const channel::SerialExecutor* executor)
      : pending_(std::move(pending)),
        label_(std::move(label)),
        rank_(rank),
        deadlock_detector_(std::move(deadlock_detector)),
        executor_(executor) {}

 private:
  PendingPtr pending_;
  std::string label_;
  int rank_;
  std::shared_ptr<channel::DeadlockDetector> deadlock_detector_;
  const channel::SerialExecutor* executor_;  // compared, never dereferenced: the group may already be destroyed
};

}  // namespace lockstep::comm
