#include "lockstep/amp/grad_scaler.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <cmath>
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
    "call scale(loss).backward(), then unscale_() if it is needed, step() for each optimizer, and update()";

[[noreturn]] void throw_usage_error(const std::string& operation, const std::string& what,
                                    const char* hint = kCallOrder) {
  throw UsageError("GradScaler::" + operation + "(): " + what, hint);
}

/// Returns the value under `name`, which Python may have saved as an integer.
double number_of(const checkpoint::StateDict& state, const std::string& name) {
  const auto found = state.find(name);
  if (found != state.end())
    if (const auto* const integer = std::get_if<std::int64_t>(&found->second)) return static_cast<double>(*integer);
  return checkpoint::value_of<double>(state, name);
}

void reject_half(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kHalf)
    throw_usage_error(
        "unscale_", "a gradient is float16; expected float32, bfloat16 or float64",
        "keep the parameters in float32 and compute in float16 inside an Autocast, or update float32 copies "
        "(MasterWeights)");
}

/// Dense gradients, and the values of sparse ones, by device and dtype.
using TensorLists = std::vector<std::pair<at::TensorOptions, std::vector<at::Tensor>>>;

TensorLists gradients_of(const Optimizer& optimizer) {
  TensorLists lists;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      reject_half(gradient);
      if (gradient.is_sparse()) gradient = gradient._values();
      const auto same = [&](const auto& entry) {
        return entry.first.device() == gradient.device() && entry.first.dtype() == gradient.dtype();
      };
      auto list = std::find_if(lists.begin(), lists.end(), same);
      if (list == lists.end()) list = lists.insert(lists.end(), {gradient.options(), {}});
      list->second.push_back(gradient);
    }
  return lists;
}

std::vector<at::Tensor> unscale_in_place(const Optimizer& optimizer, const at::Tensor& inverse) {
  const TensorLists lists = gradients_of(optimizer);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> found_inf;
  for (const auto& [options, list] : lists) {
    const at::Device device = options.device();
    auto place = std::find_if(found_inf.begin(), found_inf.end(),
                              [&](const at::Tensor& flag) { return flag.device() == device; });
    if (place == found_inf.end())
      place = found_inf.insert(found_inf.end(), at::zeros({}, at::dtype(at::kFloat).device(device)));
    at::_amp_foreach_non_finite_check_and_unscale_(list, *place, inverse.to(device));
  }
  return found_inf;
}

/// 1 if one of `found_inf`, which has one for each device, is 1, and 0 otherwise: libtorch's fused updates skip for no
/// other number than 1.
at::Tensor any_of(const std::vector<at::Tensor>& found_inf, at::Device device) {
  at::Tensor any = at::zeros({}, at::dtype(at::kFloat).device(device));
  for (const at::Tensor& flag : found_inf) any = at::maximum(any, flag.to(device));
  return any;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : enabled_(options.enabled), warn_below_(options.warn_below), group_(options.group) {
  if (!(options.init_scale > 0))
    throw UsageError("GradScaler: init_scale is " + std::to_string(options.init_scale) + "; expected more than 0");
  if (!(options.warn_below >= 0))
    throw UsageError("GradScaler: warn_below is " + std::to_string(options.warn_below) + "; expected 0 or more");
  set_state({.scale = options.init_scale,
             .growth_factor = options.growth_factor,
             .backoff_factor = options.backoff_factor,
             .growth_interval = options.growth_interval},
            "GradScaler");
}

void GradScaler::set_state(const State& state, const char* operation) {
  const auto require = [&](bool good, const char* name, double value, const char* expected) {
    base::check_option(good, operation, name, value, expected);
  };
  // The scale may have fallen to 0 after many non-finite gradients.
  require(state.scale >= 0 && std::isfinite(state.scale), "scale", state.scale, "a finite number, 0 or more");
  require(state.growth_factor > 1 && std::isfinite(state.growth_factor), "growth_factor", state.growth_factor,
          "a finite number, more than 1");
  require(state.backoff_factor > 0 && state.backoff_factor < 1, "backoff_factor", state.backoff_factor,
          "more than 0 and less than 1");
  require(state.growth_interval >= 1, "growth_interval", static_cast<double>(state.growth_interval), "1 or more");
  require(state.growth_tracker >= 0, "growth_tracker", static_cast<double>(state.growth_tracker), "0 or more");
  state_ = state;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled_) return loss;
  if (!loss.defined()) throw_usage_error("scale", "the loss is undefined; expected a defined tensor");
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
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  auto* unscaling_optimizer = dynamic_cast<UnscalingOptimizer*>(&optimizer);
  if (!unscaling_optimizer) return unscale_in_place(optimizer, inverse);
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      reject_half(parameter);  // on all ranks, also on those without a gradient
  switch (unscaling_optimizer->unscale(inverse)) {
    case UnscaleResult::kUnscaleInPlace: return unscale_in_place(optimizer, inverse);
    case UnscaleResult::kNoGradients: return {};
    case UnscaleResult::kFinite: return {at::zeros({})};
    case UnscaleResult::kNonFinite: break;
  }
  return {at::ones({})};
}

std::vector<at::Tensor> GradScaler::all_reduce_found_inf(const std::vector<at::Tensor>& found_inf) {
  const at::Tensor seen = at::full({}, !found_inf.empty(), at::dtype(at::kFloat).device(group_->device()));
  const at::Tensor all = at::stack({any_of(found_inf, group_->device()), seen});
  group_->all_reduce(all, comm::ReduceOp::kMax, {.name = "found_inf"});
  if (found_inf.empty() && all[1].item<float>() == 0) return {};
  return {all[0]};
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) return;
  require_scale("unscale_");
  PerOptimizerState& state = optimizers_[&optimizer];
  if (state.stage == Stage::kUnscaled)
    throw_usage_error("unscale_", "called twice for this optimizer since the last update(); expected one call");
  if (state.stage == Stage::kStepped)
    throw_usage_error("unscale_", "called after step() of this optimizer; expected before it");
  std::vector<at::Tensor> found_inf = unscale_gradients(optimizer);
  if (group_) found_inf = all_reduce_found_inf(found_inf);
  state = {Stage::kUnscaled, std::move(found_inf)};
}

StepResult GradScaler::step(Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return StepResult(true);
  }
  require_scale("step");
  PerOptimizerState& state = optimizers_[&optimizer];
  if (state.stage == Stage::kStepped)
    throw_usage_error("step", "called twice for this optimizer since the last update(); expected one call");
  if (state.stage == Stage::kReady) unscale_(optimizer);
  if (state.found_inf.empty()) {
    state.stage = Stage::kReady;
    throw_usage_error("step", "no parameter of this optimizer has a gradient",
                      "call backward() on a scaled loss that depends on these parameters");
  }
  auto* unscaling_optimizer = dynamic_cast<UnscalingOptimizer*>(&optimizer);
  if (unscaling_optimizer && state.found_inf.front().device() == scale_.device()) {
    const at::Tensor found_inf = any_of(state.found_inf, scale_.device());
    if (unscaling_optimizer->step_unless_found_inf(found_inf)) {
      state.stage = Stage::kStepped;
      return StepResult(found_inf);
    }
  }
  const bool finite = all_finite(state.found_inf);
  if (finite)
    optimizer.step();
  else if (unscaling_optimizer)
    unscaling_optimizer->skip_step();
  state.stage = Stage::kStepped;
  return StepResult(finite);
}

/// Blocks until the device is done.
bool GradScaler::all_finite(const std::vector<at::Tensor>& found_inf) {
  const at::Tensor both = at::stack({any_of(found_inf, scale_.device()), scale_}).to(at::kCPU);
  const float scale = both[1].item<float>();
  if (scale < warn_below_ && !warned_) {
    warned_ = true;
    std::ostringstream text;
    text << "GradScaler: the scale has fallen to " << scale << ", below warn_below (" << warn_below_
         << "). Gradients that are non-finite at every scale are not caused by scaling: look for a division by zero or "
            "a logarithm of zero";
    base::log_warning(text.str());
  }
  return both[0].item<float>() == 0;
}

void GradScaler::update() {
  if (!enabled_) return;
  require_scale("update");
  std::vector<at::Tensor> found_inf;
  for (const auto& [optimizer, state] : optimizers_)
    found_inf.insert(found_inf.end(), state.found_inf.begin(), state.found_inf.end());
  if (found_inf.empty())
    throw_usage_error("update", "no optimizer has been stepped or unscaled since the last update()");
  at::_amp_update_scale_(scale_, tracker_, any_of(found_inf, scale_.device()), state_.growth_factor,
                         state_.backoff_factor, state_.growth_interval);
  optimizers_.clear();
}

void GradScaler::update(double new_scale) {
  if (!enabled_) return;
  require_scale("update");
  if (!(new_scale > 0))
    throw_usage_error("update", "new_scale is " + std::to_string(new_scale) + "; expected more than 0");
  scale_.fill_(new_scale);
  optimizers_.clear();
}

double GradScaler::get_scale() const {
  if (!enabled_) return 1;
  return scale_.defined() ? scale_.item<double>() : state_.scale;
}

void GradScaler::set_growth_factor(double factor) {
  State state = state_;
  state.growth_factor = factor;
  set_state(state, "GradScaler::set_growth_factor()");
}

void GradScaler::set_backoff_factor(double factor) {
  State state = state_;
  state.backoff_factor = factor;
  set_state(state, "GradScaler::set_backoff_factor()");
}

void GradScaler::set_growth_interval(std::int64_t interval) {
  State state = state_;
  state.growth_interval = interval;
  set_state(state, "GradScaler::set_growth_interval()");
}

checkpoint::StateDict GradScaler::state_dict() const {
  if (!enabled_) return {};
  return {{"scale", get_scale()},
          {"growth_factor", state_.growth_factor},
          {"backoff_factor", state_.backoff_factor},
          {"growth_interval", state_.growth_interval},
          {"_growth_tracker", tracker_.defined() ? tracker_.item<std::int64_t>() : state_.growth_tracker}};
}

void GradScaler::load_state_dict(const checkpoint::StateDict& state) {
  if (!enabled_) return;
  if (state.empty())
    throw_usage_error("load_state_dict", "the state is that of a disabled scaler; expected that of an enabled one",
                      "do not load it, or construct this scaler with enabled = false");
  const State loaded{.scale = number_of(state, "scale"),
                     .growth_factor = number_of(state, "growth_factor"),
                     .backoff_factor = number_of(state, "backoff_factor"),
                     .growth_interval = checkpoint::value_of<std::int64_t>(state, "growth_interval"),
                     .growth_tracker = checkpoint::value_of<std::int64_t>(state, "_growth_tracker")};
  if (state.size() != 5)
    throw_usage_error(
        "load_state_dict",
        "the state has " + std::to_string(state.size()) +
            " entries; expected scale, growth_factor, backoff_factor, growth_interval and _growth_tracker",
        "");
  set_state(loaded, "GradScaler::load_state_dict()");
  if (!scale_.defined()) return;
  scale_.fill_(loaded.scale);
  tracker_.fill_(loaded.growth_tracker);
}

}  // namespace lockstep::amp
