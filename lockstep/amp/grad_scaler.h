// Loss scaling: small gradients stay above the smallest number of float16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/amp/scaler_state.h"
#include "lockstep/comm/group.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::amp {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor =
      2;  ///< the scale is multiplied by this after `growth_interval` steps without an infinity; more than 1
  double backoff_factor = 0.5;  ///< and by this after a step with one; less than 1
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: losses and gradients stay as they are, and step() is the optimizer's
  double floor = 1;     ///< a warning, once, when the scale is below it: an infinity that comes at every scale is no
                        ///< overflow. 0: none
  /// Ranks that agree on what is finite, for gradients that are not averaged over all of them: without a
  /// DistributedDataParallel, and with DdpOptions.average_hosts_every. All of them call unscale_() and step() alike
  /// then, and wait for each other. Means carry an infinity to all ranks by themselves.
  std::optional<comm::Group> group;
};

/// Whether GradScaler::step() made a step. Where a device alone knows, asking waits for it; between the step and the
/// next one.
class StepResult {
 public:
  explicit StepResult(bool made) : stepped_(made) {}
  /// Of a tensor of one element that is 0 if it was made.
  explicit StepResult(at::Tensor found) : found_inf_(std::move(found)) {}
  operator bool() const { return found_inf_.defined() ? found_inf_.item<float>() == 0 : stepped_; }

 private:
  bool stepped_ = false;
  at::Tensor found_inf_;
};

/// torch.amp.GradScaler of Python: the same scale and the same skipped steps, after Micikevicius et al.,
/// arXiv:1710.03740.
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);  // only if gradients are looked at or clipped before step()
///   scaler.step(optimizer);
///   scaler.update();
///
/// One for all losses and optimizers of a training; update() once a step, after all of them. With several backward()
/// calls a step, all losses get one scale, and what follows is called after the last. All ranks make it alike. Waits
/// for other ranks only as the optimizer does and as `group` says; for a device once a step() at most, and not at all
/// with an optimizer that can skip there (optim/fused_optimizer.h); `floor` is looked at where it waits. Calls in
/// another order are a UsageError that says what is missing; nothing has changed then. Not for several threads.
///
/// An optimizer of lockstep::optim on one host has no averaged gradients: unscale_() looks at the means in one pass
/// that stores none, its step() unscales them, and .grad() shows this rank's own, scaled, unless average_gradients() is
/// called, before or after. clip_grad_norm() after unscale_() takes no further pass. Exact for all but gradients of
/// float64 beyond 1e154, whose squares count as infinite.
class GradScaler {
 public:
  /// Throws UsageError.
  explicit GradScaler(const GradScalerOptions& options = {});

  /// Times the scale.
  at::Tensor scale(const at::Tensor& loss);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the gradients of this optimizer's parameters by the scale, and notes whether all are finite. Gradients of
  /// float16 are a UsageError: they have lost what scaling kept.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// unscale_() unless that was called, then the optimizer's step(), unless a gradient was not finite. True when it was
  /// made: a schedule of learning rates moves only then.
  StepResult step(torch::optim::Optimizer& optimizer);
  /// Ends the step: the scale backs off if some optimizer's gradients were not finite, and grows after growth_interval
  /// steps with none.
  void update();
  /// Ends the step; the scale is `new_scale` from now on.
  void update(double new_scale);

  bool is_enabled() const { return enabled_; }
  /// 1 when it is disabled.
  double get_scale() const;
  double get_growth_factor() const { return state_.growth_factor; }
  double get_backoff_factor() const { return state_.backoff_factor; }
  std::int64_t get_growth_interval() const { return state_.growth_interval; }
  // Throw UsageError.
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(std::int64_t interval);

  /// Between steps; nullopt when it is disabled.
  std::optional<ScalerState> state_dict() const;
  /// Throws UsageError for nullopt when it is enabled. Nothing happens when it is disabled.
  void load_state_dict(const std::optional<ScalerState>& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizerState {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found;  // on each device, 1 where a gradient was not finite
  };

  void set_state(const ScalerState& state, const char* operation);
  void require_scale(const char* operation) const;
  std::vector<at::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer) const;
  std::vector<at::Tensor> all_reduce_found_inf(const std::vector<at::Tensor>& found);
  bool all_finite(const std::vector<at::Tensor>& found);

  const bool enabled_;
  const double warn_below_;
  std::optional<comm::Group> group_;
  ScalerState state_;           // scale and growth_tracker as they were before the first loss
  at::Tensor scale_, tracker_;  // from the first loss on, on its device
  std::map<torch::optim::Optimizer*, PerOptimizerState> optimizers_;
  bool warned_ = false;
};

}  // namespace lockstep::amp
