// The optimizers of a training run, with loss scaling, clipping and schedules.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/master_weights.h"
#include "lockstep/amp/precision.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "lockstep/train/trainer_options.h"
#include "lockstep/train/training_setup.h"
#include "lockstep/train/training_state.h"

namespace lockstep::optim::inline fused {
class FusedOptimizer;
}  // namespace lockstep::optim::inline fused

namespace lockstep::training {

using ConfigureOptimizers = std::function<std::vector<OptimizerConfig>(TrainingSetup&)>;

/// Applies loss scaling, float32 master weights, clipping and schedules, according to the options, to optimizers of
/// torch or of lockstep::optim. All ranks construct it and call its functions in the same order. Used by one thread.
class OptimizerSet {
 public:
  /// The module must be on its device. `state` has the bucket layouts of the run that this run resumes. Throws
  /// UsageError if configure_optimizers() returns no optimizer or an invalid one.
  OptimizerSet(comm::Group world, torch::nn::Module& module, const TrainerOptions& options,
               const ConfigureOptimizers& configure, std::int64_t steps_per_epoch, std::int64_t total_steps,
               const TrainingState& state);
  OptimizerSet(const OptimizerSet&) = delete;
  OptimizerSet& operator=(const OptimizerSet&) = delete;

  std::size_t size() const { return entries_.size(); }
  const std::vector<torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  const std::vector<std::unique_ptr<ddp::DistributedDataParallel>>& models() const { return models_; }
  /// Returns whether one of the optimizers calls Group::step().
  bool calls_group_step() const;
  /// Learning rates of the first parameter group of each optimizer: "lr", "lr_1" ...
  NamedValues learning_rates() const;

  /// While it exists, parameters that belong only to other optimizers do not require gradients, so that, for example,
  /// the loss of a generator leaves the gradients of the discriminator unchanged.
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
  /// Runs backward() on the loss, multiplied by the loss scale and divided by `batches`, the batches of the step.
  void backward(at::Tensor loss, std::int64_t batches);
  /// Clips, updates the parameters and advances the schedule. Call it after the last backward() of the step.
  void update(std::size_t optimizer_index);
  /// Call it after update() of all optimizers.
  void end_step() { scaler_.update(); }
  /// Advances the schedules that count epochs.
  void end_epoch();

  /// Adds the settings of the optimizers, the optimizers, schedules, bucket layouts, master weights and the scaler to
  /// `state`.
  void add_to(TrainingState& state);

 private:
  /// One optimizer with its schedule and parameters.
  struct OptimizerEntry {
    std::shared_ptr<torch::optim::Optimizer> optimizer;
    optim::FusedOptimizer* fused = nullptr;
    std::optional<optim::Scheduler> scheduler;
    bool schedule_by_epoch = false;
    std::vector<at::Tensor> parameters;
  };
  checkpoint::NamedParameters named_parameters() const;
  void add_settings_to(TrainingState& state) const;

  comm::Group world_;
  torch::nn::Module& module_;
  const TrainerOptions options_;
  const amp::Precision precision_;
  std::optional<amp::MasterWeights> master_weights_;
  amp::GradScaler scaler_;
  std::vector<std::unique_ptr<ddp::DistributedDataParallel>>
      models_;  // declared before the optimizers that refer to them
  std::vector<OptimizerEntry> entries_;
  std::vector<torch::optim::Optimizer*> optimizers_;
};

}  // namespace lockstep::training
