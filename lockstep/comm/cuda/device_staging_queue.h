// Operations that wait for copies from a GPU, and those behind them.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm {

/// Gives operations to a transport of the host in the order of start(), each when its input has come from the GPU.
/// Nobody waits for that but who waits for an operation. Any thread.
class DeviceStagingQueue : public std::enable_shared_from_this<DeviceStagingQueue> {
 public:
  explicit DeviceStagingQueue(std::shared_ptr<Transport> host) : host_(std::move(host)) {}

  /// Tensors on the CPU or on a GPU. The result is copied to a GPU in the order of the current stream of the thread
  /// that sees the operation done.
  PendingPtr start(const Collective& op);
  bool empty() const;
  void abort(const std::exception_ptr& cause);

 private:
  class StagedOp;
  PendingPtr host_pending_of(const StagedOp& item);
  void advance();

  const std::shared_ptr<Transport> host_;
  mutable std::mutex mutex_;                     // guards what follows, and the items' host_pending_
  std::deque<std::shared_ptr<StagedOp>> items_;  // that the host's transport does not have yet
};

}  // namespace lockstep::comm
