// Gradient clipping for optimizers of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::optim {

// These functions expect averaged gradients: with optimizers of torch, after FusedOptimizer::average_gradients(), or in
// a single process. Otherwise use FusedOptimizer::clip_grad_norm(). They skip parameters without a gradient. They throw
// UsageError for a sparse gradient, a dtype that is not floating-point, or gradients on different devices. They wait
// neither for other ranks nor for a device. On the CPU, their passes over memory use torch's threads.

/// Multiplies all gradients in place by min(1, max_norm / (norm + 1e-6)), where `norm` is their joint 2-norm, as
/// torch::nn::utils::clip_grad_norm_ does. Returns `norm` as a scalar on the device of the first gradient: double, or
/// float where the device has no double; 0 if there are no gradients. A non-finite norm also scales the gradients,
/// which then become non-finite. Sums are in double, in an order that depends on sizes alone, so ranks with equal
/// gradients get equal bits. Throws UsageError unless max_norm is greater than 0.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm);

/// Clamps all gradients in place to [-max, max], as torch::nn::utils::clip_grad_value_ does. A NaN stays. Throws
/// UsageError unless max is greater than 0.
void clip_grad_value(const std::vector<at::Tensor>& parameters, double max);

}  // namespace lockstep::optim
