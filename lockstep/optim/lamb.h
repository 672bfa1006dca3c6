// LAMB, fused with the reduction of gradients.
#pragma once

#include <torch/optim/adam.h>

#include <array>
#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/group_options.h"

namespace lockstep::optim {

struct LAMBOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-6;
  double weight_decay = 1e-2;   ///< decoupled from the moments
  bool bias_correction = true;  ///< of the moments, as in the paper; without it the first steps are too small
  bool adapt = true;  ///< scale by the norms of parameter and step; false gives AdamW's update. Use false for biases
                      ///< and normalisation parameters, in their own group
};
template <typename Values, typename Visit>
void visit_options(Values& values, Visit visit)
  requires std::is_same_v<std::remove_const_t<Values>, LAMBOptions>
{
  visit("lr", values.lr);
  visit("beta1", values.betas[0]);
  visit("beta2", values.betas[1]);
  visit("eps", values.eps);
  visit("weight_decay", values.weight_decay);
  visit("bias_correction", values.bias_correction);
  visit("adapt", values.adapt);
}

/// Rescales Adam's step, including weight decay, to the norm of the parameter, for batches of many thousands of
/// samples. You et al., arXiv:1904.00962, algorithm 2, with phi the identity:
///   r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w;   w -= lr * |w| / |r| * r
/// where |w| / |r| is 1 if either norm is 0. Norms are of whole parameters, which costs a second pass over parameters
/// and moments. Does not support update_in_backward(). Its groups' options are GroupOptions<LAMBOptions>, whose
/// `values` may be changed.
class LAMB final : public FusedOptimizerOf<CustomOptimizer<LAMBOptions, torch::optim::AdamParamState>, LAMBOptions> {
 public:
  explicit LAMB(std::shared_ptr<ddp::GradientSource> gradients, const LAMBOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

extern template class FusedOptimizerOf<CustomOptimizer<LAMBOptions, torch::optim::AdamParamState>, LAMBOptions>;

}  // namespace lockstep::optim
