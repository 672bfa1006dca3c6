// LARS, fused with the exchange of gradients.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/optim/group_options.h"

namespace lockstep::optim {

struct LARSOptions {
  double lr = 0.1;
  double momentum = 0.9;
  double weight_decay = 0;
  double trust_coefficient = 1e-3;  ///< eta
  double eps = 1e-8;
  bool nesterov = false;  ///< wants momentum
  bool adapt = true;  ///< by the norms of parameter and gradient; without it the update is SGD's. For biases and the
                      ///< like, in a group of their own
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

/// SGD with a rate for each parameter: for batches of thousands. You, Gitman and Ginsburg, arXiv:1708.03888:
///   d = eta * |w| / (|g| + weight_decay * |w| + eps) * (g + weight_decay * w);   v = momentum * v + d;   w -= lr * v
/// with a factor of 1 where |w| or |g| is 0. The rate is outside of the momentum, as in torch's SGD; in the paper it is
/// inside, which is the same as long as the rate is. Norms are of whole parameters and averaged gradients, which costs
/// a second pass over both. It does not update in backward(). Its groups' options are GroupOptions<LARSOptions>, whose
/// `values` may be changed.
class LARS final : public torch::optim::Optimizer, public FusedOptimizer {
 public:
  /// Parameters with options of their own.
  struct Group {
    std::vector<at::Tensor> parameters;
    LARSOptions options;
  };
  /// For all parameters of a DistributedDataParallel; those that no group names get `options`. Waits for all ranks.
  /// Throws UsageError, CommError.
  explicit LARS(std::shared_ptr<ddp::GradientSource> gradients, const LARSOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  /// Waits for all ranks. Throws CommError and its kin, after which parameters are unspecified, and UsageError.
  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  /// On every rank the same, or broadcast_optimizer_state(). With FusedOptions.shard_state use load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep::optim
