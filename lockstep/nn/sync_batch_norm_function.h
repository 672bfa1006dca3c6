// What a SyncBatchNorm computes, and a BatchNorm that was converted: one autograd function. Private to nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::nn {

/// The running statistics may be undefined; else they become (1 - momentum) times themselves and momentum times the
/// whole batch's.
struct SyncBatchNormArgs {
  comm::Group group;
  std::string name;  // of the module, in errors
  at::Tensor running_mean;
  at::Tensor running_var;
  double momentum;
  double eps;
};

/// Normalizes `input` (N, C, ...) by the mean and the variance of all ranks' inputs. Waits for all ranks, in one
/// all_gather here and, where the input's gradient is needed, in one all_reduce in backward(). `weight` and `bias` may
/// be undefined. Throws UsageError on every rank where all of them together have fewer than two values a channel.
at::Tensor apply_sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const SyncBatchNormArgs& norm);

}  // namespace lockstep::nn
