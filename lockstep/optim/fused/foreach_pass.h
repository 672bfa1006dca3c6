// Updates of parameters on a device by ATen's foreach operations on lists of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
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

  /// Updates all parameters that have a gradient, and returns their indices. Requires an earlier call of
  /// rule.prepare(). `found_inf` is undefined or a tensor of one element; if that is 1, the device leaves
  /// everything unchanged. The host does not wait for it, so the rule's step counts may be too high until
  /// sync_step_counts(). With `lr_on_device`, learning rates are those that write_lr() has written.
  std::vector<std::size_t> update(const at::Tensor& found_inf, bool lr_on_device = false);
  /// Writes the learning rates of rule.prepare() to the device where they have changed. The host does not wait.
  void write_lr();
  /// Notes that the device may have skipped an update that the rule has counted.
  void mark_step_counts_stale() { step_counts_stale_ = true; }
  /// Sets the rule's step counts to the number of updates that the device has made. Blocks until the device is done if
  /// the counts can differ.
  void sync_step_counts();
  /// Copies the rule's step counts to the device. Call it after they were changed.
  void reset_step_counts();

 private:
  /// A float for each parameter on its device, 0 at first.
  struct Numbers {
    explicit Numbers(const std::vector<ddp::GradientSource::Parameter>& parameters);
    struct OfDevice {
      at::Tensor all;
      std::vector<std::size_t> indices;  // the parameter of each element
    };
    std::vector<OfDevice> devices;
    std::vector<at::Tensor> of_parameter;  // views
  };
  void update_batch(const std::vector<std::size_t>& batch, const at::Tensor& found_inf, bool lr_on_device);
  Numbers& lr_numbers();
  at::Tensor shard_view(std::size_t index, const at::Tensor& whole) const;

  const ParameterStorage& storage_;
  UpdateRule& rule_;
  const bool sharded_;  // states cover only this owner's elements
  Numbers steps_;       // step counts
  bool step_counts_stale_ = false;
  std::optional<Numbers> lr_;       // learning rates; empty before they are needed
  std::vector<double> written_lr_;  // what they were set to
};

}  // namespace lockstep::optim::inline fused
