// The argument and the result of a module's configure_optimizers().
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

namespace lockstep::training {

/// An optimizer of torch or of lockstep::optim with its learning rate schedule.
struct OptimizerConfig {
  std::shared_ptr<torch::optim::Optimizer> optimizer = nullptr;
  optim::Schedule schedule = nullptr;  ///< a function of the number of its updates; null: constant rates
  bool schedule_by_epoch = false;      ///< call the schedule with the number of epochs instead
};

/// The argument of configure_optimizers(): the group, the parameters, the length of the run, and data-parallel models.
class TrainingSetup {
 public:
  /// `parameters`: those of the module, or their float32 master weights (precision O2). `bucket_layouts`: the
  /// DdpOptions.bucket_layout of the models that ddp() will create, when a run resumes.
  TrainingSetup(comm::Group world, torch::nn::Module& module, std::vector<at::Tensor> parameters,
                std::int64_t steps_per_epoch, std::int64_t total_steps, std::vector<std::string> bucket_layouts = {});

  comm::Group& world() { return world_; }
  /// The parameters for optimizers of torch.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// The data-parallel model for optimizers of lockstep::optim: of the whole module, or of a part of it. A GAN, for
  /// example, has one for its generator and one for its discriminator. A second call for the same part returns the same
  /// model and ignores `options`. Gradients outside these parts are not reduced; without any call, the gradients of the
  /// whole module are reduced. Collective.
  ddp::DistributedDataParallel& ddp() { return ddp(module_); }
  ddp::DistributedDataParallel& ddp(nn::ModuleRef part, const ddp::DdpOptions& options = {});

  std::int64_t steps_per_epoch() const { return steps_per_epoch_; }
  std::int64_t total_steps() const { return total_steps_; }  ///< -1: unknown

  /// For the Trainer: moves the models out.
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

}  // namespace lockstep::training
