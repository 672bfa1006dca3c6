// Adagrad, fused with the exchange of gradients.
#pragma once

#include <torch/optim/adagrad.h>

#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// As torch::optim::AdagradOptions.
struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;  ///< the same in all groups
  double eps = 1e-10;
};

/// torch::optim::Adagrad in every respect but those of FusedOptimizer: options of its groups may be changed, schedulers
/// move it. A parameter has torch's state from its first update on.
class Adagrad final : public torch::optim::Adagrad, public FusedOptimizer {
 public:
  /// Parameters with options of their own.
  struct Group {
    std::vector<at::Tensor> parameters;
    AdagradOptions options;
  };
  /// For all parameters of a DistributedDataParallel; those that no group names get `options`. Waits for all ranks.
  /// Throws UsageError, CommError.
  explicit Adagrad(std::shared_ptr<ddp::GradientSource> gradients, const AdagradOptions& options = {},
                   const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  /// Waits for all ranks. Throws CommError and its kin, after which parameters are unspecified, and UsageError.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// On every rank the same, or broadcast_optimizer_state(). With FusedOptions.shard_state use load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep::optim
