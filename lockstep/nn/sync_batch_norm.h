// Batch norm by the mean and the variance of all ranks' batches.
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <string>
#include <utility>

#include "lockstep/comm/group.h"

namespace lockstep::nn {

/// As PyTorch's torch.nn.SyncBatchNorm: a BatchNorm for inputs (N, C, ...) of any number of dimensions, whose
/// statistics in training are those of all ranks' inputs together. Ranks may have batches of different sizes, also
/// none. Names of parameters and buffers are BatchNorm's, so files of one are files of the other. Inputs are float64,
/// float32, bfloat16 or float16; statistics of the last two are float32.
///
/// In training forward() waits for all ranks, and so does backward() where the input's gradient is needed: all ranks
/// call both alike, in the same order (else a DesyncError names the module as `name`), and so not under join(). In
/// eval() nothing waits for anybody; without running statistics the batch is then this rank's own, as in PyTorch.
/// Statistics are the same bits on all ranks. The gradient of the input is that of the sum of all ranks' losses; those
/// of weight and bias are this rank's parts, which DistributedDataParallel averages as any other. backward() with
/// create_graph is a UsageError. Throws UsageError for an input that does not fit, and, on all ranks, where a channel
/// has fewer than two values on all of them together.
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

/// From here on every BatchNorm1d, 2d and 3d in `module` computes as a SyncBatchNorm over `group`, whatever holds it: a
/// typed member, a Sequential, a ModuleList, the registered children. The modules stay what they are, with their
/// parameters, buffers, names and mode; so does an optimizer made before. Errors name them as `module` does.
/// ConvertedNorm again, they change to the new group. Returns how many were converted.
///
/// Inside, a child module `sync_batch_norm` (without parameters, and in no file) marks each, and the operator
/// aten::batch_norm, which BatchNorm::forward() calls, looks whether the running mean (without: the weight) is that of
/// a marked one. It follows:
/// - a converted module cannot be cloned: libtorch's clone() throws. Convert clones, each by itself.
/// - assigning another tensor to the member running_mean undoes it; loading and moving a module write into the tensor,
/// and do not.
/// - torch's own check stays that a rank's batch has more than one value a channel; none is allowed. A SyncBatchNorm
/// has no such limit. Throws UsageError, and converts nothing, where there is no such module, or one has neither weight
/// nor running statistics. Waits for nobody.
int convert_sync_batch_norm(torch::nn::Module& module, const comm::Group& group);
/// For a torch::nn::ModuleHolder or a shared_ptr.
template <typename Holder>
  requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
int convert_sync_batch_norm(Holder& holder, const comm::Group& group) {
  return convert_sync_batch_norm(static_cast<torch::nn::Module&>(*holder), group);
}

/// Whether `module` or one inside it is a SyncBatchNorm or was converted.
bool has_sync_batch_norm(const torch::nn::Module& module);

}  // namespace lockstep::nn
