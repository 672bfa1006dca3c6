// Batch normalisation with the mean and variance over the batches of all ranks.
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/nn/module_ref.h"

namespace lockstep::nn {

/// Equivalent of PyTorch's SyncBatchNorm: a BatchNorm for inputs (N, C, ...) with any number of dimensions, whose
/// statistics in training are those of all ranks' inputs together. Ranks may have batches of different sizes, including
/// empty ones. Parameters and buffers have BatchNorm's names, so checkpoints are interchangeable. Inputs are float64,
/// float32, bfloat16 or float16; statistics of the last two are float32.
///
/// In training, forward() is a collective that blocks until all ranks have called it, and so is backward() if the input
/// requires a gradient: all ranks must call both in the same order. Otherwise they throw DesyncError, which names the
/// module by `name`. Therefore it cannot be used under join(). In eval mode, no function blocks; without running
/// statistics, the statistics are those of this rank's batch, as in PyTorch. Statistics have the same bits on all
/// ranks. The gradient of the input is that of the sum of all ranks' losses. The gradients of weight and bias are this
/// rank's contributions, which DistributedDataParallel averages. Throws UsageError for an input of the wrong shape or
/// dtype, for backward() with create_graph, and, on all ranks, if a channel has fewer than two values over all ranks.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(comm::Group group, const torch::nn::BatchNormOptions& options, std::string name = "SyncBatchNorm");

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  comm::Group group_;
  std::string name_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every BatchNorm1d, BatchNorm2d and BatchNorm3d in `module` compute as a SyncBatchNorm over `group`, whether it
/// is a typed member, an element of a Sequential or ModuleList, or a registered child. The modules keep their class,
/// parameters, buffers, names and mode, and existing optimizers remain valid. Errors name them by their names in
/// `module`. Converting a module again switches it to the new group. Returns the number of converted modules. Throws
/// UsageError and converts nothing if there is no BatchNorm, or if one has neither weight nor running statistics. Does
/// not block.
///
/// Implementation: a child module `sync_batch_norm`, which has no parameters and is not saved, marks each BatchNorm.
/// The operator aten::batch_norm, which BatchNorm::forward() calls, checks whether the running mean (or without one,
/// the weight) belongs to a marked module. Consequences:
/// - A converted module cannot be cloned: libtorch's clone() throws. Convert each clone instead.
/// - Assigning another tensor to the member running_mean reverts the conversion. Loading and moving a module write into
///   the existing tensor and do not revert it.
/// - torch still requires that a rank's batch is empty or has more than one value per channel. SyncBatchNorm does not.
int convert_sync_batch_norm(ModuleRef module, const comm::Group& group);

/// True if `module` or one of its submodules is a SyncBatchNorm or was converted. Pure.
bool has_sync_batch_norm(ConstModuleRef module);

}  // namespace lockstep::nn
