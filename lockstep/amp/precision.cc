#include "lockstep/amp/precision.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <map>

#include "lockstep/base/error.h"

namespace lockstep::amp {
namespace {

const std::map<std::string, Precision>& presets() {
  static const Precision full;
  static const Precision fp16_mixed{.autocast = at::kHalf, .loss_scaling = true};
  static const Precision fp16{.weights = at::kHalf, .batch_norm_fp32 = false};
  static const std::map<std::string, Precision> all{
      {"32", full},
      {"bf16-mixed", {.autocast = at::kBFloat16}},
      {"fp16-mixed", fp16_mixed},
      {"bf16", {.weights = at::kBFloat16, .batch_norm_fp32 = false}},
      {"fp16", fp16},
      {"O0", full},
      {"O1", fp16_mixed},
      {"O2", {.weights = at::kHalf, .master_weights = true, .loss_scaling = true}},
      {"O3", fp16}};
  return all;
}

/// Why `wanted` makes no sense; empty if it does.
std::string find_conflict(const Precision& wanted) {
  const bool low_weights = wanted.weights != at::kFloat;
  if (!low_weights && !wanted.batch_norm_fp32)
    return "BatchNorm in lower precision than all other weights; allowed is batch_norm_fp32 = true";
  if (wanted.weights == at::kHalf && wanted.master_weights && !wanted.batch_norm_fp32)
    return "BatchNorm in float16, whose running variance is infinite beyond 65504, beside master weights; allowed is "
           "batch_norm_fp32 = true, or O3";
  if (!low_weights && wanted.master_weights)
    return "copies in float32 of weights that are float32; allowed is master_weights = false";
  if (wanted.weights == at::kBFloat16 && wanted.loss_scaling)
    return "loss scaling, but bfloat16 has the range of float32; allowed is loss_scaling = false";
  if (!low_weights && wanted.autocast != at::kHalf && wanted.loss_scaling)
    return "loss scaling, but nothing computes in float16; allowed is loss_scaling = false";
  if (wanted.autocast == at::kHalf && !wanted.loss_scaling)
    return "float16 without loss scaling: gradients below 6e-8 would be 0; allowed is loss_scaling = true, or "
           "bf16-mixed";
  if (wanted.weights == at::kHalf && wanted.loss_scaling && !wanted.master_weights)
    return "loss scaling for gradients of float16, which unscaling would make 0 again; allowed is master_weights = "
           "true";
  if (wanted.weights == at::kHalf && wanted.master_weights && !wanted.loss_scaling)
    return "master weights in float32 for gradients of float16 that are not scaled: those below 6e-8 would be 0; "
           "allowed is loss_scaling = true";
  return {};
}

}  // namespace

Precision parse_precision(const std::string& name, const PrecisionOverrides& overrides) {
  const auto found = presets().find(name);
  if (found == presets().end())
    throw base::UsageError("precision is \"" + name +
                           "\"; allowed are 32, bf16-mixed, fp16-mixed, bf16, fp16, O0, O1, O2 and O3");
  Precision wanted = found->second;
  wanted.batch_norm_fp32 = overrides.batch_norm_fp32.value_or(wanted.batch_norm_fp32);
  wanted.master_weights = overrides.master_weights.value_or(wanted.master_weights);
  wanted.loss_scaling = overrides.loss_scaling.value_or(wanted.loss_scaling);
  const std::string fault = find_conflict(wanted);
  if (!fault.empty()) throw base::UsageError("precision " + name + ": " + fault);
  return wanted;
}

void cast(torch::nn::Module& module, const Precision& precision) {
  const at::NoGradGuard no_grad;
  // Of other classes than torch's, as SyncBatchNorm, what has running statistics or is called so.
  const bool batch_norm = module.as<torch::nn::BatchNorm1d>() || module.as<torch::nn::BatchNorm2d>() ||
                          module.as<torch::nn::BatchNorm3d>() || module.named_buffers(false).contains("running_var") ||
                          module.name().find("BatchNorm") != std::string::npos;
  const at::ScalarType dtype = batch_norm && precision.batch_norm_fp32 ? at::kFloat : precision.weights;
  const auto move = [&](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor.set_data(tensor.to(dtype));
  };
  for (auto& item : module.named_parameters(false)) move(item.value());
  for (auto& item : module.named_buffers(false)) move(item.value());
  for (const auto& child : module.children()) cast(*child, precision);
}

}  // namespace lockstep::amp
