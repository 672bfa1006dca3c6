// An operation that goes on while its caller does something else.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

class SerialExecutor;
class DeadlockDetector;

/// A small value; copies mean the same operation. The tensors of the operation must not be touched before it is done;
/// they are kept alive until then. Dropping a Work does not end its operation. Operations of one group end in the order
/// in which they were started.
class Work {
 public:
  /// Waits until the operation is done, at most until its own deadline. Throws its error: DesyncError, PeerLostError,
  /// TimeoutError.
  void wait();
  /// The same, but throws a TimeoutError at `deadline` if that is earlier; the operation goes on and can be waited for
  /// again.
  void wait(base::Deadline deadline);

  bool done() const { return pending_->done(); }
  /// The error of an operation that is done; null when there is none, or it is not done yet.
  std::exception_ptr error() const { return pending_->done() ? pending_->error() : nullptr; }

  /// For Group: the operation `label` of `rank`, whose end `pending` announces, on `lane`.
  Work(PendingPtr pending, std::string label, int rank, std::shared_ptr<DeadlockDetector> deadlock_detector,
       const SerialExecutor* executor)
      : pending_(std::move(pending)),
        label_(std::move(label)),
        rank_(rank),
        deadlock_detector_(std::move(deadlock_detector)),
        executor_(executor) {}

 private:
  PendingPtr pending_;
  std::string label_;
  int rank_;
  std::shared_ptr<DeadlockDetector> deadlock_detector_;
  const SerialExecutor* executor_;  // a name only: the group may be gone
};

}  // namespace lockstep::comm
