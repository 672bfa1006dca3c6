// The optimizer step of 04_imagenet: SGD with momentum, warm-up and cosine decay, in any precision.
#pragma once

#include <lockstep/lockstep.h>

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "examples/04_imagenet/options.h"

/// Uses Lockstep's SGD, which updates parameters in the same pass that averages gradients. If the precision requires
/// float32 master weights, uses torch's SGD on them instead.
class OptimizerStep {
 public:
  OptimizerStep(torch::nn::Module& net, lockstep::DistributedDataParallel& ddp,
                const lockstep::amp::Precision& precision, const Options& options, std::int64_t steps_per_epoch)
      : net_(net), scaler_({.enabled = precision.loss_scaling}) {
    // docs: begin groups
    std::vector<at::Tensor> parameters = net.parameters();
    if (precision.master_weights) parameters = master_.emplace(parameters).parameters();
    std::vector<at::Tensor> weights, others;
    for (const at::Tensor& parameter : parameters) (parameter.dim() > 1 ? weights : others).push_back(parameter);
    // docs: end groups
    if (precision.master_weights) {
      const auto with_decay = [&](double decay) {
        return std::make_unique<torch::optim::SGDOptions>(
            torch::optim::SGDOptions(options.lr).momentum(options.momentum).weight_decay(decay));
      };
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(weights, with_decay(options.weight_decay));
      groups.emplace_back(others, with_decay(0));
      optimizer_ = std::make_unique<torch::optim::SGD>(groups, *with_decay(0));
    } else {
      lockstep::optim::SGDOptions all{
          .lr = options.lr, .momentum = options.momentum, .weight_decay = options.weight_decay},
          no_decay = all;
      no_decay.weight_decay = 0;
      optimizer_ = std::make_unique<lockstep::optim::SGD>(ddp, all,
                                                          std::vector<lockstep::optim::SGD::Group>{{others, no_decay}});
    }
    const auto warmup_steps =
        static_cast<std::int64_t>(std::llround(options.warmup * static_cast<double>(steps_per_epoch)));
    const std::int64_t decay_steps = std::max<std::int64_t>(1, options.epochs * steps_per_epoch - warmup_steps);
    const auto cosine = lockstep::optim::cosine_decay({.steps = decay_steps});
    scheduler_.emplace(*optimizer_, warmup_steps > 0 ? lockstep::optim::warmup(warmup_steps, cosine, 0.01) : cosine);
  }

  /// Runs backward(), the update of the parameters, and the schedule of the learning rate. If gradients are not finite,
  /// the GradScaler skips the update and the schedule. Collective.
  void backward_and_step(const at::Tensor& loss) {
    net_.zero_grad();
    scaler_.scale(loss).backward();
    if (master_) master_->copy_gradients_from_model();
    const bool stepped = scaler_.step(*optimizer_);
    if (stepped && master_) master_->copy_values_to_model();
    scaler_.update();
    if (stepped) scheduler_->step();
  }

 private:
  torch::nn::Module& net_;
  std::optional<lockstep::amp::MasterWeights> master_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<lockstep::optim::Scheduler> scheduler_;
  lockstep::GradScaler scaler_;
};
