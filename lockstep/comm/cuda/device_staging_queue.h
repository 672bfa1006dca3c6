// A queue of operations that wait until their input has been copied from a GPU.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm::cuda {

/// Starts operations on a host transport in the order of start(). Each starts when its input has been copied from the
/// GPU. Only callers that wait for an operation block on the copy. Thread-safe.
class DeviceStagingQueue : public std::enable_shared_from_this<DeviceStagingQueue> {
 public:
  explicit DeviceStagingQueue(std::shared_ptr<Transport> host) : host_(std::move(host)) {}

  /// Queues an operation on tensors on the CPU or on a GPU; does not wait. The thread whose done() or wait_until()
  /// completes the operation copies the result to the GPU, on its current stream.
  PendingPtr start(const Collective& op);
  /// Returns true if all operations have been passed to the host transport.
  bool empty() const;
  /// Finishes the queued operations with `cause`.
  void abort(const std::exception_ptr& cause);

 private:
  class StagedOp;
  PendingPtr host_pending_of(const StagedOp& item);
  void advance();

  const std::shared_ptr<Transport> host_;
  mutable std::mutex mutex_;                     // guards items_ and StagedOp::host_pending_
  std::deque<std::shared_ptr<StagedOp>> items_;  // the operations that have not been started on the host transport
};

}  // namespace lockstep::comm::cuda
