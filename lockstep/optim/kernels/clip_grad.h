// Clipping of gradients for optimizers of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::optim {

// They are for gradients that are means already: with torch's optimizers, after average_gradients() of ours, or of one
// process. An optimizer of ours has a clip_grad_norm() of its own. Parameters without a gradient are passed over; a
// sparse gradient is a UsageError, and so is a dtype that is not floating. They wait for nobody, and not for a device
// either. On the CPU each reads and writes memory once a pass, on as many threads as torch has.

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), in place, where `norm` is the 2-norm of them together, as
/// torch::nn::utils::clip_grad_norm_ does, and returns `norm`: a scalar of double on the device of the first gradient
/// (of float where the device has no double), without gradients 0. A norm that is not finite scales, too: then
/// gradients are not finite either. Sums are of double, in an order that depends on sizes alone, so ranks that have the
/// same gradients get the same bits. Throws UsageError unless max_norm is more than 0.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

/// Makes what is more than `max` in any gradient `max`, and what is less than -max -max, in place, as
/// torch::nn::utils::clip_grad_value_ does. A NaN stays. Throws UsageError unless max is more than 0.
void clip_grad_value(const std::vector<at::Tensor>& parameters, double max);

}  // namespace lockstep::optim
