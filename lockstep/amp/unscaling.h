// How GradScaler unscales gradients whose mean is never stored.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::amp {

enum class UnscaleResult {
  kUnscaleInPlace,  ///< nothing was done: gradients are the means over the ranks, and are to be unscaled where they lie
  kNoGradients,     ///< no rank has a gradient
  kFinite,          ///< all means are; the next step() unscales them
  kNonFinite,       ///< some are not
};

/// An optimizer that averages gradients in step(). All ranks call what is here alike, wait for each other, and get the
/// same answer.
class UnscalingOptimizer {
 public:
  /// Looks at the means of all gradients, and multiplies them by `inverse_scale` in the next step(). Throws UsageError,
  /// CommError.
  virtual UnscaleResult unscale(double inverse_scale) = 0;
  /// Where gradients are unscaled in place, on a device: step(), unless `skip`, of one element there, is not 0; nobody
  /// waits to know. False: nothing was done, and whoever calls must know.
  virtual bool step_unless_found_inf(const at::Tensor& found_inf) = 0;
  /// Instead of step(): the step ends without an update. Waits for nobody.
  virtual void skip_step() = 0;

 protected:
  ~UnscalingOptimizer() = default;
};

}  // namespace lockstep::amp
