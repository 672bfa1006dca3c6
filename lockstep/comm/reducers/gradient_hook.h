// GradientHook: replaces the all_reduce of a bucket of gradients, for compression or another reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"

namespace lockstep::comm {

/// Several gradients, one after another in flat memory.
struct Bucket {
  std::size_t index = 0;           ///< in the order in which buckets are reduced
  std::vector<std::string> names;  ///< names of the parameters whose gradients it contains
  /// [n]: before start(), this rank's gradients divided by the number of ranks (or by gradient_predivide_factor); after
  /// finish(), the sum over the ranks.
  at::Tensor buffer;
};

/// The operations that a hook may use. All ranks must start the same operations in the same order.
class HookContext {
 public:
  HookContext(Channel& channel, const std::string& label, std::uint64_t seq);
  int rank() const { return channel_.rank(); }
  int size() const { return channel_.size(); }
  /// Starts summing `tensor` over the ranks, in place. Does not wait for other ranks.
  PendingPtr all_reduce(const at::Tensor& tensor);
  /// Starts gathering the ranks' inputs in rank order. `output` must have size() times as many elements as `input`.
  PendingPtr all_gather(const at::Tensor& output, const at::Tensor& input);
  /// Blocks until the operation is done and throws its error. Bounded like all waits for other ranks
  /// (deadlock_detector.h).
  void wait(Pending& pending);

 private:
  Channel& channel_;
  Collective op_;
};

/// A hook is called for every bucket, in the order of their indices: start() on the thread that computes gradients or
/// ends backward(), finish() at the end of backward(). Its results must have the same bits on all ranks.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  virtual std::string name() const = 0;
  /// Starts the communication for a full bucket. Must not block. Returns the Pending to wait for before finish().
  virtual PendingPtr start(Bucket& bucket, HookContext& context) = 0;
  /// Called when the Pending from start() is done. Must store the sum over the ranks in bucket.buffer. May start more
  /// operations and wait for them.
  virtual void finish(Bucket& bucket, HookContext& context) = 0;
};

}  // namespace lockstep::comm
