#include "lockstep/optim/clip_grad.h"

#include <torch/optim/optimizer.h>

#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/kernels/clip_grad.h"

namespace lockstep::optim {
namespace {

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

}  // namespace

at::Tensor clip_grad_norm(torch::optim::Optimizer& optimizer, double max_norm) {
  if (auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer)) return fused->clip_norm(max_norm);
  return kernels::clip_norm(parameters_of(optimizer), max_norm);
}
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm) {
  return kernels::clip_norm(parameters, max_norm);
}

void clip_grad_value(torch::optim::Optimizer& optimizer, double max) {
  if (auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer)) return fused->clip_value(max);
  kernels::clip_value(parameters_of(optimizer), max);
}
void clip_grad_value(const std::vector<at::Tensor>& parameters, double max) { kernels::clip_value(parameters, max); }

}  // namespace lockstep::optim
