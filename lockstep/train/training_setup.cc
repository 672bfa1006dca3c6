#include "lockstep/train/training_setup.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

namespace lockstep::training {

TrainingSetup::TrainingSetup(comm::Group world, torch::nn::Module& module, std::vector<at::Tensor> parameters,
                             std::int64_t steps_per_epoch, std::int64_t total_steps,
                             std::vector<std::string> bucket_layouts)
    : world_(std::move(world)),
      module_(module),
      parameters_(std::move(parameters)),
      steps_per_epoch_(steps_per_epoch),
      total_steps_(total_steps),
      bucket_layouts_(std::move(bucket_layouts)) {}

ddp::DistributedDataParallel& TrainingSetup::ddp(nn::ModuleRef part, const ddp::DdpOptions& options) {
  const auto there = std::find(modules_.begin(), modules_.end(), &*part);
  if (there != modules_.end()) return *models_[static_cast<std::size_t>(there - modules_.begin())];
  ddp::DdpOptions same = options;
  if (same.bucket_layout.empty() && models_.size() < bucket_layouts_.size())
    same.bucket_layout = bucket_layouts_[models_.size()];
  models_.push_back(std::make_unique<ddp::DistributedDataParallel>(part, world_, same));
  modules_.push_back(&*part);
  return *models_.back();
}

}  // namespace lockstep::training
