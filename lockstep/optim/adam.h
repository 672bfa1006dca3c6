// Adam and AdamW, fused with the exchange of gradients.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <array>
#include <memory>
#include <vector>

#include "lockstep/optim/fused/fused_optimizer.h"

namespace lockstep::optim {

/// As torch::optim::AdamOptions.
struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
};
/// As torch::optim::AdamWOptions.
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< decoupled from the gradient
  bool amsgrad = false;
};

/// torch::optim::Adam in every respect but those of FusedOptimizer: options of its groups may be changed, schedulers of
/// torch move it. amsgrad must be on in some group from the beginning to be switched on in any.
class Adam final : public torch::optim::Adam, public FusedOptimizer {
 public:
  /// Parameters with options of their own.
  struct Group {
    std::vector<at::Tensor> parameters;
    AdamOptions options;
  };
  /// For all parameters of a DistributedDataParallel; those that no group names get `options`. Waits for all ranks.
  /// Throws UsageError, CommError.
  explicit Adam(std::shared_ptr<ddp::GradientSource> gradients, const AdamOptions& options = {},
                const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  /// Waits for all ranks. Throws CommError and its kin, after which parameters are unspecified, and UsageError.
  torch::Tensor step(LossClosure closure = nullptr) override;
  /// On every rank the same, or broadcast_optimizer_state(). With FusedOptions.shard_state use load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;
  void save(torch::serialize::OutputArchive& archive) const override;
};

/// torch::optim::AdamW likewise.
class AdamW final : public torch::optim::AdamW, public FusedOptimizer {
 public:
  struct Group {
    std::vector<at::Tensor> parameters;
    AdamWOptions options;
  };
  explicit AdamW(std::shared_ptr<ddp::GradientSource> gradients, const AdamWOptions& options = {},
                 const std::vector<Group>& groups = {}, const FusedOptions& fused = {});

  torch::Tensor step(LossClosure closure = nullptr) override;
  void load(torch::serialize::InputArchive& archive) override;
  void save(torch::serialize::OutputArchive& archive) const override;
};

}  // namespace lockstep::optim
