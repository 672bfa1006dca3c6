// The passes over memory of clip_grad_norm() and clip_grad_value() (optim/clip_grad.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::optim::kernels {

constexpr double kClipEpsilon = 1e-6;  // torch::nn::utils::clip_grad_norm_'s

/// clip_grad_norm() of a list of parameters.
at::Tensor clip_norm(const std::vector<at::Tensor>& parameters, double max_norm);

/// clip_grad_value() of a list of parameters.
void clip_value(const std::vector<at::Tensor>& parameters, double max);

}  // namespace lockstep::optim::kernels
