// Copies in float32 of parameters in lower precision, for an optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::amp {

/// An update smaller than half a unit in the last place of a float16 or bfloat16 parameter is lost; in its copy it adds
/// up.
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
/// Waits for nobody: with a DistributedDataParallel of the model gradients are means and copies equal on all ranks.
/// Made after that, so that values are those of rank 0. Not for optimizers of lockstep::optim, whose state alone is in
/// float32.
class MasterWeights {
 public:
  /// Throws UsageError for a parameter that is not of floating point.
  explicit MasterWeights(std::vector<at::Tensor> parameters);

  /// In the order of the parameters; a parameter of float32 or float64 has a copy too, in its dtype.
  const std::vector<at::Tensor>& parameters() const { return copies_; }
  /// Gradients of the copies become those of the parameters; undefined where those are. What they were before is gone.
  void copy_gradients_from_model();
  /// Rounds the copies into the parameters.
  void copy_values_to_model() const;
  /// The reverse, after weights were loaded into the model.
  void copy_values_from_model();

 private:
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> copies_;
};

}  // namespace lockstep::amp
