// Adam and AdamW, fused with the reduction of gradients.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <array>
#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// Same fields and defaults as torch::optim::AdamOptions and AdamWOptions.
template <bool decoupled>
struct AdamFamilyOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = decoupled ? 1e-2 : 0;  ///< of AdamW: decoupled from the gradient
  bool amsgrad = false;
};
using AdamOptions = AdamFamilyOptions<false>;
using AdamWOptions = AdamFamilyOptions<true>;

template <bool decoupled, typename Visit>
void visit_options(AdamFamilyOptions<decoupled>& values, const Visit& visit) {
  auto& [lr, betas, eps, weight_decay, amsgrad] = values;
  visit("lr", lr);
  visit("betas", betas);
  visit("eps", eps);
  visit("weight_decay", weight_decay);
  visit("amsgrad", amsgrad);
}

template <bool decoupled, typename TorchOptions>
void copy_options(const AdamFamilyOptions<decoupled>& from, TorchOptions& to) {
  const auto& [lr, betas, eps, weight_decay, amsgrad] = from;
  to.lr(lr).betas({betas[0], betas[1]}).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad);
}

/// Behaves like torch::optim::Adam, with the differences that FusedOptimizer documents. Options of its parameter groups
/// may be changed, and torch's learning rate schedulers work with it. amsgrad can be enabled later only if at least one
/// group has it at construction.
class Adam final : public FusedOptimizerOf<torch::optim::Adam, AdamOptions> {
 public:
  explicit Adam(std::shared_ptr<ddp::GradientSource> gradients, const AdamOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

/// Behaves like torch::optim::AdamW; everything else is as documented for Adam above.
class AdamW final : public FusedOptimizerOf<torch::optim::AdamW, AdamWOptions> {
 public:
  explicit AdamW(std::shared_ptr<ddp::GradientSource> gradients, const AdamWOptions& options = {},
                 const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

extern template class FusedOptimizerOf<torch::optim::Adam, AdamOptions>;
extern template class FusedOptimizerOf<torch::optim::AdamW, AdamWOptions>;

}  // namespace lockstep::optim
