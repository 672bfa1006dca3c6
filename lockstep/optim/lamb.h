// LAMB, fused with the exchange of gradients.
#pragma once

#include <torch/optim/optimizer.h>

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
  bool bias_correction = true;  ///< of the moments, as in the paper; without it the first steps are short
  bool adapt = true;  ///< by the norms of parameter and step; without it the update is AdamW's. For biases and the
                      ///< like, in a group of their own
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

/// Adam's step, with the decay of weights added, made as long as the parameter is, times the rate: for batches of many
/// thousands. You et al., arXiv:1904.00962, algorithm 2, where phi is the identity:
///   r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w;   w -= lr * |w| / |r| * r
/// with |w| / |r| taken as 1 where one of them is 0. Norms are of whole parameters, which costs a second pass over
/// parameters and moments. It does not update in backward(). Its groups' options are GroupOptions<LAMBOptions>, whose
/// `values` may be changed.
class LAMB final : public torch::optim::Optimizer, public FusedOptimizer {
 public:
  /// Parameters with options of their own.
  struct Group {
    std::vector<at::Tensor> parameters;
    LAMBOptions options;
  };
  /// For all parameters of a DistributedDataParallel; those that no group names get `options`. Waits for all ranks.
  /// Throws UsageError, CommError.
  explicit LAMB(std::shared_ptr<ddp::GradientSource> gradients, const LAMBOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  /// Waits for all ranks. Throws CommError and its kin, after which parameters are unspecified, and UsageError.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// On every rank the same, or broadcast_optimizer_state(). With FusedOptions.shard_state use load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep::optim
