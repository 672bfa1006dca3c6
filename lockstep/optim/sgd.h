// Stochastic gradient descent with momentum, fused with the reduction of gradients.
#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// Same fields and defaults as torch::optim::SGDOptions.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< requires momentum and zero dampening
};

template <typename Visit>
void visit_options(SGDOptions& values, const Visit& visit) {
  auto& [lr, momentum, dampening, weight_decay, nesterov] = values;
  visit("lr", lr);
  visit("momentum", momentum);
  visit("dampening", dampening);
  visit("weight_decay", weight_decay);
  visit("nesterov", nesterov);
}

inline void copy_options(const SGDOptions& from, torch::optim::SGDOptions& to) {
  const auto& [lr, momentum, dampening, weight_decay, nesterov] = from;
  to.lr(lr).momentum(momentum).dampening(dampening).weight_decay(weight_decay).nesterov(nesterov);
}

/// Behaves like torch::optim::SGD, with the differences that FusedOptimizer documents. Options of its parameter groups
/// may be changed, and torch's learning rate schedulers work with it. Momentum can be enabled later only if at least
/// one group has momentum at construction.
class SGD final : public FusedOptimizerOf<torch::optim::SGD, SGDOptions> {
 public:
  explicit SGD(std::shared_ptr<ddp::GradientSource> gradients, const SGDOptions& options = {},
               const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

extern template class FusedOptimizerOf<torch::optim::SGD, SGDOptions>;

}  // namespace lockstep::optim
