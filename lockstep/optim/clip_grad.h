// Gradient clipping, for optimizers of torch and of lockstep::optim.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim {

// Call these functions between backward() and step(). They clip averaged gradients, so all ranks clip alike.
//
// For an optimizer of torch, or a list of parameters, they change .grad() at once. They skip parameters without a
// gradient, and throw UsageError for a sparse gradient, a dtype that is not floating-point, or gradients on different
// devices. They wait neither for other ranks nor for a device. On the CPU, their passes over memory use torch's
// threads.
//
// For an optimizer of lockstep::optim (FusedOptimizer), the next step() clips while it reads the gradients; .grad()
// does not change, except with FusedOptions.foreach, where they change it at once. A backward() before that step()
// cancels the request. Clamping happens after the scaling of clip_grad_norm() and GradScaler::unscale_(): call these
// two before clip_grad_value(). Its gradients must not be clipped as a list of parameters: they are averages only after
// FusedOptimizer::average_gradients(), and step() throws UsageError for gradients that were changed without it.

/// Multiplies the gradients of all parameters of `optimizer` by min(1, max_norm / (norm + 1e-6)), where `norm` is their
/// joint 2-norm, as torch::nn::utils::clip_grad_norm_ does. Returns `norm` as a scalar on the device of the first
/// gradient: double, or float where the device has no double; 0 if there are no gradients. A non-finite norm also
/// scales the gradients, which then become non-finite. Sums are in double, in an order that depends on sizes alone, so
/// ranks with equal gradients get equal bits. Throws UsageError unless max_norm is greater than 0.
///
/// For an optimizer of lockstep::optim it is a collective that makes one more pass over the gradients: it blocks until
/// all ranks of the host have called it, if these share the parameters, and with FusedOptions.shard_state between hosts
/// until all ranks have. After GradScaler::unscale_() it
/// makes no pass, and the norm is that of the unscaled gradients. Throws UsageError after clip_grad_value(), and while
/// update_in_backward() is on.
at::Tensor clip_grad_norm(torch::optim::Optimizer& optimizer, double max_norm);
/// The same for a list of parameters, for example MasterWeights::parameters().
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

/// Clamps the gradients of all parameters of `optimizer` to [-max, max], as torch::nn::utils::clip_grad_value_ does. A
/// NaN stays. Does not wait for other ranks. Throws UsageError unless max is greater than 0, and for an optimizer of
/// lockstep::optim while update_in_backward() is on.
void clip_grad_value(torch::optim::Optimizer& optimizer, double max);
/// The same for a list of parameters.
void clip_grad_value(const std::vector<at::Tensor>& parameters, double max);

}  // namespace lockstep::optim
