// Transport: moves data between ranks. docs/internals/adding-a-transport.md explains how to add one.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm::shm {
class GradientTable;
}  // namespace lockstep::comm::shm

namespace lockstep::comm::inline interface {

/// The operations, dtypes and devices that a transport supports; by default all of them, for tensors on the CPU. Group
/// rejects all others with a UsageError.
struct Capabilities {
  std::vector<CollectiveKind> kinds = {
      CollectiveKind::kAllReduce,     CollectiveKind::kReduce, CollectiveKind::kBroadcast, CollectiveKind::kAllGather,
      CollectiveKind::kReduceScatter, CollectiveKind::kGather, CollectiveKind::kScatter,   CollectiveKind::kAllToAll,
      CollectiveKind::kSend,          CollectiveKind::kRecv,   CollectiveKind::kBarrier};
  std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                        at::kInt,    at::kChar,  at::kByte, at::kBool};
  std::vector<at::DeviceType> devices = {at::kCPU};
  /// Supported values of Collective::wire_dtype. A transport within one host supports all of them and rounds nothing.
  std::vector<at::ScalarType> wire_dtypes = {at::kFloat};
};

/// The signature of a call: bytes that are equal on all ranks that made the same call. For transports that compare
/// signatures while they run the operation.
struct SignatureView {
  const void* bytes = nullptr;
  std::size_t size = 0;    ///< the same for all calls, at most 256
  std::uint64_t hash = 0;  ///< of the call
  /// Receives every rank's bytes, in rank order, if they are not all equal. Outlives the operation.
  std::vector<char>* all_signatures = nullptr;
};

/// An ordered stream of operations among a fixed set of ranks. All ranks start the same operations in the same order;
/// Group has compared them. One thread at a time calls start(), except for send and recv: other threads may start these
/// at the same time, one per peer and direction. Any thread may call abort().
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;
  virtual const Capabilities& capabilities() const = 0;

  /// Starts `op` and returns without waiting for other ranks, unless finishing the operation at once is faster. The
  /// tensors must stay alive and unchanged until the Pending is done. A failure of the connection is reported as the
  /// error of the Pending; start() does not throw it.
  virtual PendingPtr start(const Collective& op) = 0;

  /// Like start(), for an operation that the ranks have not compared: the ranks compare `call` with the operation. If
  /// the signatures are not all equal, only they are exchanged, and the Pending is done without an error. May block for
  /// a short time if that is faster than other ways to wait. Returns null if the transport does not support this; for
  /// a given call, all ranks must get the same answer. A rank that starts an all_gather of its `call` instead, as the
  /// operation with the same number, counts as a rank with a different call.
  virtual PendingPtr start_checked(const Collective& op, const SignatureView& call) { return nullptr; }

  /// Makes a table for gradients with the dtypes and sizes of `gradients`. All ranks must call it, in the order of
  /// their operations; blocks until they have. The table must not outlive the transport. Returns null if ranks cannot
  /// access each other's memory.
  virtual std::shared_ptr<shm::GradientTable> make_gradient_table(const std::vector<at::Tensor>& gradients) {
    return nullptr;
  }

  /// Ends all pending operations, and all later ones, with `cause`. Idempotent; does not block.
  virtual void abort(std::exception_ptr cause) noexcept = 0;
};

/// The error of operations that are pending when a transport is destroyed on `rank` (-1: unknown).
inline std::exception_ptr closed_error(const std::string& transport, int rank) {
  return std::make_exception_ptr(
      base::PeerLostError(base::Cause::kPeerUnreachable, transport, rank, rank, "the transport was closed"));
}

}  // namespace lockstep::comm::inline interface
