// The module SyncBatchNorm.
#include "lockstep/nn/sync_batch_norm.h"

#include <ATen/Functions.h>

#include <sstream>

#include "lockstep/nn/sync_batch_norm_function.h"

namespace lockstep::nn {

SyncBatchNormImpl::SyncBatchNormImpl(comm::Group group, const torch::nn::BatchNormOptions& norm, std::string name)
    : NormImplBase(norm), group_(std::move(group)), name_(std::move(name)) {}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  const bool tracks = is_training() && options.track_running_stats();
  if (tracks) num_batches_tracked += 1;
  if (!is_training())
    return at::batch_norm(input, weight, bias, running_mean, running_var, !options.track_running_stats(),
                          /*momentum=*/0, options.eps(),
                          /*cudnn_enabled=*/true);
  double momentum = options.momentum().value_or(0);
  if (tracks && !options.momentum()) momentum = 1.0 / num_batches_tracked.item<double>();
  return apply_sync_batch_norm(input, weight, bias,
                               {group_, name_, running_mean, running_var, momentum, options.eps()});
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == options.num_features() && at::isFloatingType(input.scalar_type())) return;
  std::ostringstream got;
  got << input.scalar_type() << input.sizes();
  throw base::UsageError(name_ + ": the input is " + got.str() + "; expected (N, " +
                         std::to_string(options.num_features()) + ", ...) with a floating-point dtype");
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum())
    stream << *options.momentum();
  else
    stream << "None";
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
         << ", group=" << group_.name() << ')';
}

}  // namespace lockstep::nn
