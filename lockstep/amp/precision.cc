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

/// The contradiction in `precision`; empty if there is none.
std::string find_conflict(const Precision& precision) {
  const bool low_weights = precision.weights != at::kFloat;
  if (!low_weights && !precision.batch_norm_fp32)
    return "BatchNorm has lower precision than all other weights; expected batch_norm_fp32 = true";
  if (precision.weights == at::kHalf && precision.master_weights && !precision.batch_norm_fp32)
    return "BatchNorm in float16, whose running variance overflows above 65504, with master weights; expected "
           "batch_norm_fp32 = true, or O3";
  if (!low_weights && precision.master_weights)
    return "float32 copies of weights that are float32; expected master_weights = false";
  if (precision.weights == at::kBFloat16 && precision.loss_scaling)
    return "loss scaling, but bfloat16 has the range of float32; expected loss_scaling = false";
  if (!low_weights && precision.autocast != at::kHalf && precision.loss_scaling)
    return "loss scaling, but nothing computes in float16; expected loss_scaling = false";
  if (precision.autocast == at::kHalf && !precision.loss_scaling)
    return "float16 without loss scaling: gradients below 6e-8 would be 0; expected loss_scaling = true, or bf16-mixed";
  if (precision.weights == at::kHalf && precision.loss_scaling && !precision.master_weights)
    return "loss scaling of float16 gradients, which unscaling would make 0 again; expected master_weights = true";
  if (precision.weights == at::kHalf && precision.master_weights && !precision.loss_scaling)
    return "float32 master weights for float16 gradients that are not scaled: those below 6e-8 would be 0; expected "
           "loss_scaling = true";
  return {};
}

}  // namespace

Precision parse_precision(const std::string& name, const PrecisionOverrides& overrides) {
  const auto found = presets().find(name);
  if (found == presets().end())
    throw base::UsageError("precision is \"" + name +
                           "\"; expected 32, bf16-mixed, fp16-mixed, bf16, fp16, O0, O1, O2 or O3");
  Precision precision = found->second;
  precision.batch_norm_fp32 = overrides.batch_norm_fp32.value_or(precision.batch_norm_fp32);
  precision.master_weights = overrides.master_weights.value_or(precision.master_weights);
  precision.loss_scaling = overrides.loss_scaling.value_or(precision.loss_scaling);
  const std::string fault = find_conflict(precision);
  if (!fault.empty()) throw base::UsageError("precision " + name + ": " + fault);
  return precision;
}

void cast(nn::ModuleRef module, const Precision& precision) {
  const at::NoGradGuard no_grad;
  // Other classes, such as SyncBatchNorm, are recognised by their running statistics or their name.
  const bool batch_norm = module->as<torch::nn::BatchNorm1d>() || module->as<torch::nn::BatchNorm2d>() ||
                          module->as<torch::nn::BatchNorm3d>() ||
                          module->named_buffers(false).contains("running_var") ||
                          module->name().find("BatchNorm") != std::string::npos;
  const at::ScalarType dtype = batch_norm && precision.batch_norm_fp32 ? at::kFloat : precision.weights;
  const auto move = [&](at::Tensor& tensor) {
    const bool would_narrow = dtype == at::kFloat && tensor.defined() && tensor.scalar_type() == at::kDouble;
    if (tensor.defined() && tensor.is_floating_point() && !would_narrow) tensor.set_data(tensor.to(dtype));
  };
  for (auto& item : module->named_parameters(false)) move(item.value());
  for (auto& item : module->named_buffers(false)) move(item.value());
  for (const auto& child : module->children()) cast(child, precision);
}

}  // namespace lockstep::amp
