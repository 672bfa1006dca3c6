// LARS, fused with the reduction of gradients.
#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/group_options.h"

namespace lockstep::optim {

struct LARSOptions {
  double lr = 0.1;
  double momentum = 0.9;
  double weight_decay = 0;
  double trust_coefficient = 1e-3;  ///< eta in the paper
  double eps = 1e-8;
  bool nesterov = false;  ///< requires momentum
  bool adapt = true;  ///< scale by the norms of parameter and gradient; false gives SGD's update. Use false for biases
                      ///< and normalisation parameters, in their own group
};
template <typename Values, typename Visit>
void visit_options(Values& values, Visit visit)
  requires std::is_same_v<std::remove_const_t<Values>, LARSOptions>
{
  visit("lr", values.lr);
  visit("momentum", values.momentum);
  visit("weight_decay", values.weight_decay);
  visit("trust_coefficient", values.trust_coefficient);
  visit("eps", values.eps);
  visit("nesterov", values.nesterov);
  visit("adapt", values.adapt);
}

/// SGD with a learning rate per parameter, for batches of thousands of samples. You, Gitman and Ginsburg,
/// arXiv:1708.03888:
///   d = eta * |w| / (|g| + weight_decay * |w| + eps) * (g + weight_decay * w);   v = momentum * v + d;   w -= lr * v
/// where the factor is 1 if |w| or |g| is 0. The learning rate is applied after the momentum, as in torch's SGD; the
/// paper applies it before, which is equivalent while the rate is constant. Norms are of whole parameters and averaged
/// gradients, which costs a second pass over both. Does not support update_in_backward(). Its groups' options are
/// GroupOptions<LARSOptions>, whose `values` may be changed.
class LARS final : public FusedOptimizerOf<CustomOptimizer<LARSOptions, torch::optim::SGDParamState>, LARSOptions> {
 public:
  explicit LARS(std::shared_ptr<ddp::GradientSource> gradients, const LARSOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});
};

extern template class FusedOptimizerOf<CustomOptimizer<LARSOptions, torch::optim::SGDParamState>, LARSOptions>;

}  // namespace lockstep::optim
