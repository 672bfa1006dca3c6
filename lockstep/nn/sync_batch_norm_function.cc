#include "lockstep/nn/sync_batch_norm_function.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = std::optional<at::Tensor>;

constexpr double kNoMomentum = 0;

/// Saved in the graph for backward().
struct SavedForBackward : torch::CustomClassHolder {
  SavedForBackward(const SyncBatchNormArgs& norm, std::int64_t values)
      : group(norm.group), name(norm.name), eps(norm.eps), count(values) {}
  comm::Group group;
  std::string name;
  double eps;
  std::int64_t count;  // values per channel over all ranks
};

Moments all_gather_moments(const at::Tensor& input, const SyncBatchNormArgs& norm) {
  comm::Group group = norm.group;
  const at::Tensor row = pack_moments(input);
  if (group.size() == 1) return combine_moments(row.unsqueeze(0));
  const at::Tensor rows = at::empty({group.size() * row.numel()}, row.options().device(group.device()));
  group.all_gather(rows, row.to(group.device()), {.name = norm.name + ".forward"});
  return combine_moments(rows.cpu().view({group.size(), row.numel()}));
}

void update_running_statistic(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(value.to(running.options()), momentum);
}

/// (x - mean) / sqrt(variance + eps) * weight + bias, in one pass.
at::Tensor normalize(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                     const at::Tensor& mean, const at::Tensor& variance, double eps) {
  return std::get<0>(at::native_batch_norm(x, weight, bias, mean, variance, /*training=*/false, kNoMomentum, eps));
}

OptionalTensor cast_optional(const OptionalTensor& tensor, const at::TensorOptions& options) {
  return tensor ? OptionalTensor(tensor->to(options)) : std::nullopt;
}

OptionalTensor if_defined(const at::Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  // torch's Function rejects undefined tensors as arguments, but accepts empty optionals.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const OptionalTensor& weight,
                            const OptionalTensor& bias, const SyncBatchNormArgs& norm) {
    const Moments all = all_gather_moments(input, norm);
    if (all.count < 2)
      throw base::UsageError(norm.name + ": all ranks together have " + std::to_string(all.count) +
                             " values per channel; expected 2 or more in training");
    const auto count = static_cast<double>(all.count);
    const auto options = at::TensorOptions(input.device()).dtype(statistics_dtype(input.scalar_type()));
    const at::Tensor mean = all.mean.to(options);
    const at::Tensor variance = (all.squared_deviations / count).to(options);
    update_running_statistic(norm.running_mean, all.mean, norm.momentum);
    update_running_statistic(norm.running_var, all.squared_deviations / (count - 1), norm.momentum);
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance});
    context->saved_data["norm"] = c10::IValue::make_capsule(c10::make_intrusive<SavedForBackward>(norm, all.count));
    if (input.numel() == 0) return at::empty_like(input);
    return normalize(input.to(options), cast_optional(weight, options), cast_optional(bias, options), mean, variance,
                     norm.eps)
        .to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = c10::static_intrusive_pointer_cast<SavedForBackward>(context->saved_data["norm"].toCapsule());
    if (at::GradMode::is_enabled())
      throw base::UsageError(saved->name +
                             ": backward() called with create_graph = true; expected false, because SyncBatchNorm "
                             "supports only first derivatives");
    const auto variables = context->get_saved_variables();
    const at::Tensor &input = variables[0], &mean = variables[2], &variance = variables[3];
    const OptionalTensor weight = if_defined(variables[1]);
    const at::TensorOptions options = mean.options();
    const at::Tensor x = input.to(options), dy = gradients[0].to(options);

    // Sums of dy * xhat and of dy over this rank's batch, which are the gradients of weight and bias.
    at::Tensor dot = at::zeros_like(mean), sum = at::zeros_like(mean);
    if (input.numel() > 0)  // the CPU reads the running statistics; CUDA the saved ones and the weight's dtype
      std::tie(std::ignore, dot, sum) = at::native_batch_norm_backward(dy, x, at::ones_like(mean), mean, variance, mean,
                                                                       (variance + saved->eps).rsqrt(), /*train=*/false,
                                                                       saved->eps, {false, true, true});
    at::Tensor dx;
    if (context->needs_input_grad(0))
      dx = input_gradient(*saved, x, dy, cast_optional(weight, options), mean, variance, dot, sum)
               .to(input.scalar_type());
    if (!weight) return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
    return {dx, dot.to(weight->scalar_type()), sum.to(weight->scalar_type()), at::Tensor()};
  }

  static at::Tensor input_gradient(SavedForBackward& saved, const at::Tensor& x, const at::Tensor& dy,
                                   const OptionalTensor& weight, const at::Tensor& mean, const at::Tensor& variance,
                                   const at::Tensor& dot, const at::Tensor& sum) {
    at::Tensor sums = at::cat({dot, sum}).to(at::kDouble);
    if (saved.group.size() > 1) {
      sums = sums.to(saved.group.device());
      saved.group.all_reduce(sums, comm::ReduceOp::kSum, {.name = saved.name + ".backward"});
    }
    if (x.numel() == 0) return at::empty_like(x);
    const at::Tensor means = (sums / static_cast<double>(saved.count)).to(mean.options());
    at::Tensor scale = (variance + saved.eps).rsqrt();
    if (weight) scale = scale * *weight;
    const auto channels = mean.numel();
    const at::Tensor common = normalize(x, -scale * means.narrow(0, 0, channels),
                                        -scale * means.narrow(0, channels, channels), mean, variance, saved.eps);
    std::vector<std::int64_t> along(static_cast<std::size_t>(x.dim()), 1);
    along[1] = channels;
    return common.addcmul_(dy, scale.view(along));
  }
};

}  // namespace

at::ScalarType statistics_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor pack_moments(const at::Tensor& input) {
  const std::int64_t channels = input.size(1);
  const at::Tensor row = at::zeros({2 * channels + 1}, at::kDouble);
  if (input.numel() == 0) return row;
  const auto count = static_cast<double>(input.numel() / channels);
  const auto [mean, variance] = at::batch_norm_update_stats(input.to(statistics_dtype(input.scalar_type())), {}, {}, 0);
  row.narrow(0, 0, channels).copy_(mean);
  row.narrow(0, channels, channels).copy_(variance).mul_(count);
  row.narrow(0, 2 * channels, 1).fill_(count);
  return row;
}

Moments combine_moments(const at::Tensor& rows) {
  const std::int64_t channels = (rows.size(1) - 1) / 2;
  Moments all{at::zeros({channels}, at::kDouble), at::zeros({channels}, at::kDouble), 0};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  auto* const squared_deviations = all.squared_deviations.mutable_data_ptr<double>();
  double count = 0;
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto* const row = rows.const_data_ptr<double>() + rank * rows.size(1);
    const double row_count = row[2 * channels];
    if (row_count == 0) continue;
    const double weight = row_count / (count + row_count);
    for (std::int64_t c = 0; c < channels; ++c) {
      const double delta = row[c] - mean[c];
      mean[c] += delta * weight;
      squared_deviations[c] += row[channels + c] + delta * delta * count * weight;
    }
    count += row_count;
  }
  all.count = static_cast<std::int64_t>(count);
  return all;
}

at::Tensor apply_sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const SyncBatchNormArgs& norm) {
  return SyncBatchNormFunction::apply(input, if_defined(weight), if_defined(bias), norm);
}

}  // namespace lockstep::nn
