#include "lockstep/train/training_setup.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

namespace lockstep::train {

TrainingSetup::TrainingSetup(comm::Group world, torch::nn::Module& module, std::vector<at::Tensor> parameters,
                             std::int64_t steps_per_epoch, std::int64_t total_steps, std::vector<std::string> layouts)
    : world_(std::move(world)),
      module_(module),
      parameters_(std::move(parameters)),
      steps_per_epoch_(steps_per_epoch),
      total_steps_(total_steps),
      layouts_(std::move(layouts)) {}

ddp::DistributedDataParallel& TrainingSetup::ddp() { return ddp(module_); }

ddp::DistributedDataParallel& TrainingSetup::ddp(torch::nn::Module& part, const ddp::DdpOptions& options) {
  const auto there = std::find(of_.begin(), of_.end(), &part);
  if (there != of_.end()) return *made_[static_cast<std::size_t>(there - of_.begin())];
  ddp::DdpOptions same = options;
  if (same.bucket_layout.empty() && made_.size() < layouts_.size()) same.bucket_layout = layouts_[made_.size()];
  made_.push_back(std::make_unique<ddp::DistributedDataParallel>(part, world_, same));
  of_.push_back(&part);
  return *made_.back();
}

}  // namespace lockstep::train
