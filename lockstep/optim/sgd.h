// Stochastic gradient descent with momentum, fused with the exchange of gradients.
#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// As torch::optim::SGDOptions.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  ///< wants momentum, and no dampening
};

/// torch::optim::SGD in every respect but those of FusedOptimizer: options of its groups may be changed, schedulers of
/// torch move it. What needs a momentum must have it in some group from the beginning.
class SGD final : public torch::optim::SGD, public FusedOptimizer {
 public:
  /// Parameters with options of their own.
  struct Group {
    std::vector<at::Tensor> parameters;
    SGDOptions options;
  };
  /// For all parameters of a DistributedDataParallel; those that no group names get `options`. Waits for all ranks.
  /// Throws UsageError, CommError.
  explicit SGD(std::shared_ptr<ddp::GradientSource> gradients, const SGDOptions& options = {},
               const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  /// Waits for all ranks. Throws CommError and its kin, after which parameters are unspecified, and UsageError.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// On every rank the same, or broadcast_optimizer_state(). With FusedOptions.shard_state use load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep::optim
