// An update of parameters on a device: lists of tensors instead of pieces.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/optim/fused/parameter_storage.h"
#include "lockstep/optim/fused/update_rule.h"

namespace lockstep::optim {

/// From gradients that are means already. What is alike (one group of options, dtype and device, as many updates) is
/// updated by one operation on all its tensors; of bfloat16 and half sums and state are in float.
class ForeachPass {
 public:
  /// Both outlive this. Throws UsageError when an option of `rule` has no such update.
  ForeachPass(const ParameterStorage& storage, UpdateRule& rule, bool sharded);

  /// After rule.prepare(). Calls updated(part) for each that has a gradient. With `skip`, a tensor of one element,
  /// nothing changes where it is not 0, and nobody waits to know; the rule's counts are behind then until settle().
  template <typename Updated>
  void update(const at::Tensor& found_inf, const Updated& updated) {
    for (const std::size_t index : update_all(found_inf)) updated(index);
  }
  /// The rule's counts of steps become those of updates that were made. Waits for the device, if they can differ.
  void sync_step_counts();
  /// The reverse, after the rule's counts were set.
  void reset_step_counts();

 private:
  struct Batch;
  std::vector<std::size_t> update_all(const at::Tensor& found_inf);
  void update_batch(std::size_t index, const Batch& alike, const at::Tensor& found_inf);
  at::Tensor gradient_like(std::size_t index) const;
  at::Tensor own(std::size_t index, const at::Tensor& whole) const;

  const ParameterStorage& storage_;
  UpdateRule& rule_;
  const bool sharded_;             // states are of a part of the elements
  std::vector<at::Tensor> steps_;  // of each part, on its device
  bool step_counts_stale_ = false;
};

}  // namespace lockstep::optim
