// Adagrad, fused with the reduction of gradients.
#pragma once

#include <torch/optim/adagrad.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// Same fields and defaults as torch::optim::AdagradOptions.
struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;  ///< must be the same in all groups
  double eps = 1e-10;
};

template <typename Visit>
void visit_options(AdagradOptions& values, const Visit& visit) {
  auto& [lr, lr_decay, weight_decay, initial_accumulator_value, eps] = values;
  visit("lr", lr);
  visit("lr_decay", lr_decay);
  visit("weight_decay", weight_decay);
  visit("initial_accumulator_value", initial_accumulator_value);
  visit("eps", eps);
}

inline void copy_options(const AdagradOptions& from, torch::optim::AdagradOptions& to) {
  const auto& [lr, lr_decay, weight_decay, initial_accumulator_value, eps] = from;
  to.lr(lr).lr_decay(lr_decay).weight_decay(weight_decay).initial_accumulator_value(initial_accumulator_value).eps(eps);
}

/// Behaves like torch::optim::Adagrad, with the differences that FusedOptimizer documents. Options of its parameter
/// groups may be changed, and torch's learning rate schedulers work with it. A parameter has no state before its first
/// update.
class Adagrad final : public FusedOptimizerOf<torch::optim::Adagrad, AdagradOptions> {
 public:
  explicit Adagrad(std::shared_ptr<ddp::GradientSource> gradients, const AdagradOptions& options = {},
                   const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

extern template class FusedOptimizerOf<torch::optim::Adagrad, AdagradOptions>;

}  // namespace lockstep::optim
