// The interface through which GradScaler unscales gradients whose mean is never stored.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::amp {

enum class UnscaleResult {
  kUnscaleInPlace,  ///< unscale() did nothing: .grad() holds the means, and the caller must unscale them in place
  kNoGradients,     ///< no rank has a gradient
  kFinite,          ///< all means are finite; the next step() unscales them
  kNonFinite,       ///< some means are not finite
};

/// An optimizer that averages gradients in step(). unscale() and step_unless_found_inf() are collectives: all ranks
/// call them in the same order, each call blocks until all have, and all ranks get the same result.
class UnscalingOptimizer {
 public:
  /// Checks the means of all gradients, and schedules their multiplication by `inverse_scale`, a tensor of one element,
  /// in the next step(). Throws UsageError and CommError.
  virtual UnscaleResult unscale(const at::Tensor& inverse_scale) = 0;
  /// For gradients that are unscaled in place on a device: makes a step() that the device skips if `found_inf`, a
  /// tensor of one element there that is 0 or 1, is 1. The host does not wait for the value. Returns false if it did
  /// nothing; the caller must then read `found_inf` and call step() or skip_step().
  virtual bool step_unless_found_inf(const at::Tensor& found_inf) = 0;
  /// Call it instead of step(): ends the step without an update. Does not block.
  virtual void skip_step() = 0;

 protected:
  ~UnscalingOptimizer() = default;
};

}  // namespace lockstep::amp
