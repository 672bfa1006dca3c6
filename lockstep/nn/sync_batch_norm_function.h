// The autograd function of SyncBatchNorm and of converted BatchNorm modules. Private to nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::nn {

/// Arguments besides input, weight and bias. The running statistics may be undefined; otherwise they are updated to
/// (1 - momentum) * running + momentum * statistics of the whole batch.
struct SyncBatchNormArgs {
  comm::Group group;
  std::string name;  // of the module, in errors
  at::Tensor running_mean;
  at::Tensor running_var;
  double momentum;
  double eps;
};

/// Normalises `input` (N, C, ...) by the mean and variance of all ranks' inputs. A collective: blocks until all ranks
/// have called it, in one all_gather here and, if the input requires a gradient, in one all_reduce in backward().
/// `weight` and `bias` may be undefined. Throws UsageError on every rank if all ranks together have fewer than two
/// values per channel.
at::Tensor apply_sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const SyncBatchNormArgs& norm);

}  // namespace lockstep::nn
