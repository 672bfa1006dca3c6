// What a module's configure_optimizers() is given, and what it gives back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/schedules/schedule.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::train {

/// An optimizer of torch or of lockstep::optim, and how its rates go.
struct OptimizerConfig {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  optim::Schedule schedule = nullptr;  ///< of the number of its updates; null: rates stay
  bool schedule_by_epoch = false;      ///< of the number of epochs instead
};

/// What is known before the first step.
class TrainingSetup {
 public:
  /// `parameters` of the module, or copies of them in float32 that are updated in their place (precision O2).
  /// `layouts`: DdpOptions.bucket_layout of what ddp() will make, where a training goes on.
  TrainingSetup(comm::Group world, torch::nn::Module& module, std::vector<at::Tensor> parameters,
                std::int64_t steps_per_epoch, std::int64_t total_steps, std::vector<std::string> bucket_layouts = {});

  comm::Group& world() { return world_; }
  /// For optimizers of torch.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// For optimizers of lockstep::optim: one model, which is the module, or a part of it: a GAN has one for its
  /// generator and one for its discriminator. Each is made once. What belongs to none of them is exchanged with none:
  /// without a call, all of the module is.
  ddp::DistributedDataParallel& ddp();
  ddp::DistributedDataParallel& ddp(torch::nn::Module& part, const ddp::DdpOptions& options = {});
  template <typename Holder>
    requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
  ddp::DistributedDataParallel& ddp(Holder& holder, const ddp::DdpOptions& options = {}) {
    return ddp(static_cast<torch::nn::Module&>(*holder), options);
  }

  std::int64_t steps_per_epoch() const { return steps_per_epoch_; }
  std::int64_t total_steps() const { return total_steps_; }  ///< -1: nobody knows

  /// For the trainer.
  std::vector<std::unique_ptr<ddp::DistributedDataParallel>> release_models() { return std::move(models_); }

 private:
  comm::Group world_;
  torch::nn::Module& module_;
  const std::vector<at::Tensor> parameters_;
  const std::int64_t steps_per_epoch_, total_steps_;
  const std::vector<std::string> bucket_layouts_;
  std::vector<std::unique_ptr<ddp::DistributedDataParallel>> models_;
  std::vector<torch::nn::Module*> modules_;
};

}  // namespace lockstep::train
