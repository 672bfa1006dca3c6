// Updates of parameters on a device by ATen's foreach operations on lists of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim::inline fused {

/// Updates parameters from gradients that are already means. Parameters that share options, dtype, device and step
/// count form a batch, and each operation handles all tensors of a batch. For bfloat16 and half, sums and state are in
/// float.
class ForeachPass {
 public:
  /// `storage` and `rule` must outlive this object. `sharded`: state covers only this owner's elements. Throws
  /// UsageError if `rule` needs norms of whole parameters while state is sharded.
  ForeachPass(const ParameterStorage& storage, UpdateRule& rule, bool sharded);

  /// Updates all parameters that have a gradient and calls updated(index) for each. Requires an earlier call of
  /// rule.prepare(). `found_inf` is undefined or a tensor of one element; if that is not 0, the device leaves
  /// everything unchanged. The host does not wait for it, so the rule's step counts may be too high until
  /// sync_step_counts().
  template <typename Updated>
  void update(const at::Tensor& found_inf, const Updated& updated) {
    for (const std::size_t index : update_all(found_inf)) updated(index);
  }
  /// Sets the rule's step counts to the number of updates that the device has made. Blocks until the device is done if
  /// the counts can differ.
  void sync_step_counts();
  /// Copies the rule's step counts to the device. Call it after they were changed.
  void reset_step_counts();

 private:
  struct Batch;
  std::vector<std::size_t> update_all(const at::Tensor& found_inf);
  void update_batch(std::size_t index, const Batch& batch, const at::Tensor& found_inf);
  at::Tensor gradient_like(std::size_t index) const;
  at::Tensor shard_view(std::size_t index, const at::Tensor& whole) const;

  const ParameterStorage& storage_;
  UpdateRule& rule_;
  const bool sharded_;             // states cover only this owner's elements
  std::vector<at::Tensor> steps_;  // the step count of each parameter, on its device
  bool step_counts_stale_ = false;
};

}  // namespace lockstep::optim::inline fused
