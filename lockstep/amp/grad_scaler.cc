#include "lockstep/amp/grad_scaler.h"

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <sstream>
#include <utility>

#include "lockstep/amp/unscaling.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::amp {
namespace {

using base::UsageError;
using torch::optim::Optimizer;

constexpr const char* kCallOrder =
    "a step is scale(loss).backward(), unscale_() if it is needed, step() of each optimizer, update()";

[[noreturn]] void throw_usage_error(const std::string& operation, const std::string& what,
                                    const char* hint = kCallOrder) {
  throw UsageError("GradScaler::" + operation + "(): " + what, hint);
}

void reject_half(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kHalf)
    throw_usage_error(
        "unscale_", "a gradient is of float16; allowed are gradients of float32, bfloat16 and float64",
        "keep the parameters in float32 and compute in float16 inside an Autocast, or update copies in float32 "
        "(MasterWeights)");
}

/// What lies in memory of the gradients, by device and dtype.
using TensorLists = std::vector<std::pair<at::TensorOptions, std::vector<at::Tensor>>>;

TensorLists gradients_of(const Optimizer& optimizer) {
  TensorLists lists;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      reject_half(gradient);
      if (gradient.is_sparse()) gradient = gradient._values();
      const auto same = [&](const auto& list) {
        return list.first.device() == gradient.device() && list.first.dtype() == gradient.dtype();
      };
      auto found = std::find_if(lists.begin(), lists.end(), same);
      if (found == lists.end()) found = lists.insert(lists.end(), {gradient.options(), {}});
      found->second.push_back(gradient);
    }
  return lists;
}

at::Tensor inverse_scale_of(const at::Tensor& scale) { return scale.to(at::kDouble).reciprocal().to(at::kFloat); }

std::vector<at::Tensor> unscale_in_place(const Optimizer& optimizer, const at::Tensor& scale) {
  const TensorLists lists = gradients_of(optimizer);
  const at::NoGradGuard no_grad;
  const at::Tensor inverse = inverse_scale_of(scale);
  std::vector<at::Tensor> found;
  for (const auto& [options, list] : lists) {
    const at::Device device = options.device();
    auto place =
        std::find_if(found.begin(), found.end(), [&](const at::Tensor& one) { return one.device() == device; });
    if (place == found.end()) place = found.insert(found.end(), at::zeros({}, at::dtype(at::kFloat).device(device)));
    at::_amp_foreach_non_finite_check_and_unscale_(list, *place, inverse.to(device));
  }
  return found;
}

at::Tensor sum_of(const std::vector<at::Tensor>& found, at::Device device) {
  at::Tensor sum = at::zeros({}, at::dtype(at::kFloat).device(device));
  for (const at::Tensor& one : found) sum += one.to(device);
  return sum;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : enabled_(options.enabled), warn_below_(options.floor), group_(options.group) {
  if (!(options.init_scale > 0))
    throw UsageError("GradScaler: init_scale is " + std::to_string(options.init_scale) + "; allowed is more than 0");
  if (!(options.floor >= 0))
    throw UsageError("GradScaler: floor is " + std::to_string(options.floor) + "; allowed is 0 or more");
  set_state({.scale = options.init_scale,
             .growth_factor = options.growth_factor,
             .backoff_factor = options.backoff_factor,
             .growth_interval = options.growth_interval},
            "GradScaler");
}

void GradScaler::set_state(const ScalerState& state, const char* operation) {
  check(state, operation);
  state_ = state;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled_) return loss;
  if (!loss.defined()) throw_usage_error("scale", "the loss is undefined; allowed is a tensor");
  if (!scale_.defined()) {
    const auto place = at::TensorOptions().device(loss.device());
    scale_ = at::full({}, state_.scale, place.dtype(at::kFloat));
    tracker_ = at::full({}, state_.growth_tracker, place.dtype(at::kInt));
  }
  return loss * scale_.to(loss.device());
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::require_scale(const char* operation) const {
  if (!scale_.defined())
    throw_usage_error(operation, "no loss has been scaled", "call scale(loss).backward() instead of loss.backward()");
}

std::vector<at::Tensor> GradScaler::unscale_gradients(Optimizer& optimizer) const {
  auto* unscaling_optimizer = dynamic_cast<UnscalingOptimizer*>(&optimizer);
  if (!unscaling_optimizer) return unscale_in_place(optimizer, scale_);
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      reject_half(parameter);  // on all ranks alike, whoever has a gradient
  switch (unscaling_optimizer->unscale(inverse_scale_of(scale_).item<double>())) {
    case UnscaleResult::kUnscaleInPlace: return unscale_in_place(optimizer, scale_);
    case UnscaleResult::kNoGradients: return {};
    case UnscaleResult::kFinite: return {at::zeros({})};
    case UnscaleResult::kNonFinite: break;
  }
  return {at::ones({})};
}

std::vector<at::Tensor> GradScaler::all_reduce_found_inf(const std::vector<at::Tensor>& found) {
  const at::Tensor seen = at::full({}, !found.empty(), at::dtype(at::kFloat).device(group_->device()));
  const at::Tensor all = at::stack({sum_of(found, group_->device()), seen});
  group_->all_reduce(all, comm::ReduceOp::kMax, {.name = "found_inf"});
  if (found.empty() && all[1].item<float>() == 0) return {};
  return {all[0]};
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) return;
  require_scale("unscale_");
  PerOptimizerState& state = optimizers_[&optimizer];
  if (state.stage == Stage::kUnscaled)
    throw_usage_error("unscale_", "called again for this optimizer since the last update(); allowed is once");
  if (state.stage == Stage::kStepped)
    throw_usage_error("unscale_", "called after step() of this optimizer; allowed is before it");
  std::vector<at::Tensor> found = unscale_gradients(optimizer);
  if (group_) found = all_reduce_found_inf(found);
  state = {Stage::kUnscaled, std::move(found)};
}

StepResult GradScaler::step(Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return StepResult(true);
  }
  require_scale("step");
  PerOptimizerState& state = optimizers_[&optimizer];
  if (state.stage == Stage::kStepped)
    throw_usage_error("step", "called again for this optimizer since the last update(); allowed is once");
  if (state.stage == Stage::kReady) unscale_(optimizer);
  if (state.found.empty()) {
    state.stage = Stage::kReady;
    throw_usage_error("step", "no parameter of this optimizer has a gradient",
                      "call backward() on a scaled loss that these parameters lead to");
  }
  auto* unscaling_optimizer = dynamic_cast<UnscalingOptimizer*>(&optimizer);
  if (unscaling_optimizer && state.found.front().device() == scale_.device()) {
    const at::Tensor found = sum_of(state.found, scale_.device());
    if (unscaling_optimizer->step_unless_found_inf(found)) {
      state.stage = Stage::kStepped;
      return StepResult(found);
    }
  }
  const bool finite = all_finite(state.found);
  if (finite)
    optimizer.step();
  else if (unscaling_optimizer)
    unscaling_optimizer->skip_step();
  state.stage = Stage::kStepped;
  return StepResult(finite);
}

/// The one place that waits for a device.
bool GradScaler::all_finite(const std::vector<at::Tensor>& found) {
  const at::Tensor both = at::stack({sum_of(found, scale_.device()), scale_}).to(at::kCPU);
  const float scale = both[1].item<float>();
  if (scale < warn_below_ && !warned_) {
    warned_ = true;
    std::ostringstream text;
    text << "GradScaler: the scale has come down to " << scale << ", below its floor of " << warn_below_
         << ": gradients that are not finite at every scale do not come from scaling; look for what divides by zero or "
            "takes the logarithm of it";
    base::log_warning(text.str());
  }
  return both[0].item<float>() == 0;
}

void GradScaler::update() {
  if (!enabled_) return;
  require_scale("update");
  std::vector<at::Tensor> found;
  for (const auto& [optimizer, state] : optimizers_) found.insert(found.end(), state.found.begin(), state.found.end());
  if (found.empty()) throw_usage_error("update", "no optimizer's gradients have been looked at since the last one");
  at::_amp_update_scale_(scale_, tracker_, sum_of(found, scale_.device()), state_.growth_factor, state_.backoff_factor,
                         state_.growth_interval);
  optimizers_.clear();
}

void GradScaler::update(double new_scale) {
  if (!enabled_) return;
  require_scale("update");
  if (!(new_scale > 0))
    throw_usage_error("update", "new_scale is " + std::to_string(new_scale) + "; allowed is more than 0");
  scale_.fill_(new_scale);
  optimizers_.clear();
}

double GradScaler::get_scale() const {
  if (!enabled_) return 1;
  return scale_.defined() ? scale_.item<double>() : state_.scale;
}

void GradScaler::set_growth_factor(double factor) {
  ScalerState state = state_;
  state.growth_factor = factor;
  set_state(state, "GradScaler::set_growth_factor()");
}

void GradScaler::set_backoff_factor(double factor) {
  ScalerState state = state_;
  state.backoff_factor = factor;
  set_state(state, "GradScaler::set_backoff_factor()");
}

void GradScaler::set_growth_interval(std::int64_t interval) {
  ScalerState state = state_;
  state.growth_interval = interval;
  set_state(state, "GradScaler::set_growth_interval()");
}

std::optional<ScalerState> GradScaler::state_dict() const {
  if (!enabled_) return std::nullopt;
  ScalerState state = state_;
  state.scale = get_scale();
  if (tracker_.defined()) state.growth_tracker = tracker_.item<std::int64_t>();
  return state;
}

void GradScaler::load_state_dict(const std::optional<ScalerState>& state) {
  if (!enabled_) return;
  if (!state)
    throw_usage_error("load_state_dict", "the state is that of a disabled scaler; allowed is one of an enabled scaler",
                      "load none, or make this one with enabled = false");
  set_state(*state, "GradScaler::load_state_dict()");
  if (!scale_.defined()) return;
  scale_.fill_(state->scale);
  tracker_.fill_(state->growth_tracker);
}

}  // namespace lockstep::amp
