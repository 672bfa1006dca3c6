// GradientHook: replaces the all_reduce of a bucket of gradients, for compression or another reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm::inline interface {

/// Several gradients of one dtype and device, one after another in flat memory. Entry k of `names`, `shapes`, `strides`
/// and `offsets` describes gradient k. Everything except the contents of `buffer` stays the same until the next
/// GradientHook::buckets_changed().
struct Bucket {
  std::size_t index = 0;           ///< in the order in which buckets are reduced
  std::vector<std::string> names;  ///< of the parameters
  std::vector<std::vector<std::int64_t>> shapes;
  /// In elements. They are those of the parameter, if its elements are dense in memory, and otherwise contiguous: a
  /// transposed parameter has a transposed gradient.
  std::vector<std::vector<std::int64_t>> strides;
  /// Where the gradient begins in `buffer`, in elements. Gradients begin on multiples of 64; the elements between them
  /// are zero and must stay finite.
  std::vector<std::int64_t> offsets;
  /// [n]: before start(), this rank's gradients divided by the number of ranks (or by gradient_predivide_factor); after
  /// finish(), the sum over the ranks. A gradient that this rank does not have is zero. Hooks write to this memory and
  /// do not replace the tensor.
  at::Tensor buffer;

  /// Returns gradient k: a view of `buffer` with the gradient's shape.
  at::Tensor gradient(std::size_t k) const { return buffer.as_strided(shapes[k], strides[k], offsets[k]); }
};

/// The operations that a hook may use, valid during the call that receives it. All ranks must start the same operations
/// in the same order.
class HookContext {
 public:
  virtual ~HookContext() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Starts summing `tensor` over the ranks, in place. Does not wait for other ranks.
  virtual PendingPtr all_reduce(const at::Tensor& tensor) = 0;
  /// The same for a float32 tensor, whose sums are sent between hosts as int8 and nothing is rounded inside a host.
  /// Returns null, on all ranks, if the transport does not support it.
  virtual PendingPtr all_reduce_int8(const at::Tensor& /*tensor*/, std::shared_ptr<ErrorFeedback> /*feedback*/) {
    return nullptr;
  }
  /// Starts gathering the ranks' inputs in rank order. `output` must have size() times as many elements as `input`.
  /// Does not wait for other ranks.
  virtual PendingPtr all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
  /// Blocks until the operation is done and throws its error. Bounded like all waits for other ranks.
  virtual void wait(Pending& pending) = 0;
};

/// A hook is called for every bucket, in the order of their indices: start() on the thread that computes gradients or
/// ends backward(), finish() at the end of backward(). Its results must have the same bits on all ranks. If one of its
/// functions throws, backward() throws that error, and the other ranks' backward() throws a PeerLostError.
///
/// A hook object serves one DistributedDataParallel, because it keeps state for each bucket. No two of its functions
/// run at the same time. In a group of one rank there are no buckets, and no function except name() is called.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  /// The ranks compare the names, so the name should contain all options that must be equal.
  virtual std::string name() const = 0;
  /// Called on all ranks, between two reductions or in the first one before its first start(), when gradients have been
  /// assigned to buckets: after the first backward() has determined their order (with DdpOptions.bucket_layout, at
  /// construction), and when a gradient has lost its place because no rank has used it lately, or has got one. All
  /// ranks have the same buckets; their buffers are new and contain zeros. Allocate state here. Carry state over from
  /// the previous buckets by the names of the gradients. `buckets` is valid during the call. Must not block.
  virtual void buckets_changed(const std::vector<Bucket>& /*buckets*/) {}
  /// Starts the communication for a full bucket. Must not block. Returns the Pending to wait for before finish().
  virtual PendingPtr start(Bucket& bucket, HookContext& context) = 0;
  /// Called when the Pending from start() is done. Must store the sum over the ranks in bucket.buffer. May start more
  /// operations and wait for them.
  virtual void finish(Bucket& bucket, HookContext& context) = 0;
};

}  // namespace lockstep::comm::inline interface
