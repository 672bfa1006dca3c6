// Float32 copies of low-precision parameters, for an optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::amp {

/// An update smaller than half a unit in the last place of a float16 or bfloat16 parameter is lost; in a float32 copy
/// such updates accumulate.
///
///   MasterWeights master(net->parameters());
///   torch::optim::SGD optimizer(master.parameters(), 0.1);
///   ...
///   net->zero_grad();
///   scaler.scale(loss).backward();
///   master.copy_gradients_from_model();
///   if (scaler.step(optimizer)) master.copy_values_to_model();
///   scaler.update();
///
/// Construct it after the model's DistributedDataParallel, so that the copies hold rank 0's values; averaged gradients
/// then keep the copies equal on all ranks. No function blocks. Cannot be used with optimizers of lockstep::optim,
/// which keep only their state in float32.
class MasterWeights {
 public:
  /// Throws UsageError for a parameter whose dtype is not floating-point.
  explicit MasterWeights(std::vector<at::Tensor> parameters);

  /// The copies, in the order of the parameters. A float32 or float64 parameter has a copy in its own dtype.
  const std::vector<at::Tensor>& parameters() const { return copies_; }
  /// Replaces the gradients of the copies by those of the parameters; undefined gradients stay undefined.
  void copy_gradients_from_model();
  /// Writes the copies to the parameters, rounded to their dtype.
  void copy_values_to_model() const;
  /// Writes the parameters to the copies. Call it after loading weights into the model.
  void copy_values_from_model();

 private:
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> copies_;
};

}  // namespace lockstep::amp
