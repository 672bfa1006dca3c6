// What may happen to a bucket of gradients on its way: compression, another reduction, a fused update.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"

namespace lockstep::comm {

/// Some gradients, one after another in flat memory.
struct Bucket {
  std::size_t index = 0;           ///< in the order of travel
  std::vector<std::string> names;  ///< of the parameters in it
  at::Tensor buffer;  ///< [n], this rank's gradients divided by the number of ranks; finally the sum over ranks
};

/// The exchange's channel, for a hook: operations on it are the same, in the same order, on all ranks.
class HookContext {
 public:
  HookContext(Channel& channel, const std::string& label, std::uint64_t seq);
  int rank() const { return channel_.rank(); }
  int size() const { return channel_.size(); }
  /// Sums `tensor` over the ranks, in place.
  PendingPtr all_reduce(const at::Tensor& tensor);
  /// `output` holds size() parts like `input`.
  PendingPtr all_gather(const at::Tensor& output, const at::Tensor& input);
  /// Throws what the operation throws; bounded as all waits for other ranks are (watch.h).
  void wait(Pending& pending);

 private:
  Channel& channel_;
  Collective op_;
};

/// Called on the thread of backward(), for every bucket, in the order of their indices. Results must be the same bits
/// on all ranks.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  virtual std::string name() const = 0;
  /// The bucket is full: begins what travels. Does not wait.
  virtual PendingPtr start(Bucket& bucket, HookContext& wire) = 0;
  /// What start() returned is done: leaves the sum over the ranks in bucket.buffer. May use the wire again and wait.
  virtual void finish(Bucket& bucket, HookContext& wire) = 0;
};

}  // namespace lockstep::comm
