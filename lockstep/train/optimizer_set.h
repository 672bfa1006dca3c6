// The optimizers of a training, and what a step does with them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/master_weights.h"
#include "lockstep/amp/precision.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "lockstep/train/loggers/named_values.h"
#include "lockstep/train/trainer_options.h"
#include "lockstep/train/training_setup.h"

namespace lockstep::optim {
class FusedOptimizer;
}

namespace lockstep::train {

using ConfigureOptimizers = std::function<std::vector<OptimizerConfig>(TrainingSetup&)>;

/// Loss scaling, copies of the weights in float32, clipping and schedules, as the options say, around optimizers of
/// torch or of lockstep::optim. All ranks make it and call it alike.
class OptimizerSet {
 public:
  /// The module is on its device; `found` is the checkpoint that load() will be given. Throws UsageError.
  OptimizerSet(comm::Group world, torch::nn::Module& module, const TrainerOptions& options,
               const ConfigureOptimizers& configure, std::int64_t steps_per_epoch, std::int64_t total_steps,
               const std::optional<checkpoint::SavedCheckpoint>& resume_checkpoint);
  OptimizerSet(const OptimizerSet&) = delete;
  OptimizerSet& operator=(const OptimizerSet&) = delete;

  std::size_t size() const { return entries_.size(); }
  const std::vector<torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  const std::vector<std::unique_ptr<ddp::DistributedDataParallel>>& models() const { return models_; }
  /// Whether one of the optimizers calls Group::step().
  bool calls_group_step() const;
  /// Of the first group of each: "lr", "lr_1" ...
  NamedValues learning_rates() const;

  /// While it lives, gradients of other optimizers' parameters stay as they are: a generator's loss is no business of
  /// the discriminator.
  class ToggledOptimizer {
   public:
    ToggledOptimizer(const OptimizerSet& optimizer_set, std::size_t optimizer_index);
    ~ToggledOptimizer();
    ToggledOptimizer(const ToggledOptimizer&) = delete;
    ToggledOptimizer& operator=(const ToggledOptimizer&) = delete;

   private:
    std::vector<at::Tensor> frozen_;
  };

  void zero_grad(std::size_t optimizer_index);
  /// With the scale of the losses, and divided by the number of batches that make a step.
  void backward(at::Tensor loss, std::int64_t batches);
  /// After the last backward() of its step.
  void update(std::size_t optimizer_index);
  /// After the updates of all.
  void end_step() { scaler_.update(); }
  void end_epoch();

  /// Rank 0's parts of a checkpoint; all ranks call it, as states may be divided among them.
  void append_state(checkpoint::CheckpointParts& parts) const;
  /// Goes on from there. Throws UsageError, naming the optimizer, for a state of others.
  void load(const checkpoint::SavedCheckpoint& saved);

 private:
  /// One of the optimizers and what goes with it.
  struct OptimizerEntry {
    std::shared_ptr<torch::optim::Optimizer> optimizer;
    optim::FusedOptimizer* fused = nullptr;
    std::optional<optim::Scheduler> scheduler;
    bool schedule_by_epoch = false;
    std::vector<at::Tensor> parameters;
  };
  void clip(OptimizerEntry& entry) const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;

  comm::Group world_;
  torch::nn::Module& module_;
  const TrainerOptions options_;
  const amp::Precision precision_;
  std::optional<amp::MasterWeights> master_weights_;
  amp::GradScaler scaler_;
  std::vector<std::unique_ptr<ddp::DistributedDataParallel>> models_;  // before the optimizers that know them
  std::vector<OptimizerEntry> entries_;
  std::vector<torch::optim::Optimizer*> optimizers_;
};

}  // namespace lockstep::train
