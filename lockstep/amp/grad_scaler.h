// Loss scaling, which keeps small gradients above the smallest number of float16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::amp {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< multiplies the scale after `growth_interval` steps with finite gradients; above 1
  double backoff_factor = 0.5;  ///< multiplies the scale after a step with a non-finite gradient; less than 1
  std::int64_t growth_interval = 2000;
  bool enabled = true;    ///< false: losses and gradients are unchanged, and step() calls the optimizer's step()
  double warn_below = 1;  ///< logs a warning, once, if the scale falls below this: gradients that are non-finite at
                          ///< every scale are not caused by overflow. 0: no warning
  /// Ranks that must agree on whether gradients are finite. Required if gradients are not averaged over these ranks:
  /// without a DistributedDataParallel. Then unscale_(), and a step() without it, are collectives of this group.
  /// Otherwise an infinity reaches all ranks through the averaged gradients; with DdpOptions.average_hosts_every, all
  /// ranks of the host, and hosts may have scales of their own.
  std::optional<comm::Group> group = {};
};

/// The result of GradScaler::step(): converts to true if the optimizer made a step. If the result is only on a device,
/// the conversion blocks until the device is done. Convert it before the next step().
class StepResult {
 public:
  explicit StepResult(bool stepped) : stepped_(stepped) {}
  /// `found_inf` is a tensor of one element that is 0 if the step was made.
  explicit StepResult(at::Tensor found_inf) : found_inf_(std::move(found_inf)) {}
  operator bool() const { return found_inf_.defined() ? found_inf_.item<float>() == 0 : stepped_; }

 private:
  bool stepped_ = false;
  at::Tensor found_inf_;
};

/// Equivalent of torch.amp.GradScaler: has the same scale and skips the same steps (Micikevicius et al.,
/// arXiv:1710.03740).
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);  // only if gradients are read or clipped before step()
///   scaler.step(optimizer);
///   scaler.update();
///
/// Use one scaler for all losses and optimizers of a training run, and call update() once per step, after all
/// optimizers. With several backward() calls per step, scale each loss, and make the other calls after the last
/// backward(). All ranks must construct it with the same options and make the same calls. It waits for other ranks only
/// where the optimizer or `group` does. It waits for a device at most once per step(), and not at all with an optimizer
/// that can skip its update there (optim/fused/fused_optimizer.h); `warn_below` is checked only where it waits. A call
/// out of order throws a UsageError that names the missing call, and changes nothing. Not thread-safe.
///
/// With an optimizer of lockstep::optim whose ranks are all on one host, or on several with shard_state, gradients are
/// not averaged in memory: unscale_() checks the means in one pass that does not store them, and step() unscales them.
/// .grad() remains scaled, and no mean, unless average_gradients() is called before or after. clip_grad_norm() after
/// unscale_() needs no further pass. The check is exact except for float64 gradients above 1e154, whose squares count
/// as infinite.
class GradScaler final : public checkpoint::Stateful {
 public:
  /// Throws UsageError for an option outside its range.
  explicit GradScaler(const GradScalerOptions& options = {});

  /// Returns the loss multiplied by the scale.
  at::Tensor scale(const at::Tensor& loss);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the gradients of this optimizer's parameters by the scale and records whether all are finite. Throws
  /// UsageError for float16 gradients, in which unscaling would lose small values again.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Calls unscale_() unless it has been called, then the optimizer's step() unless a gradient was not finite. The
  /// result is true if the step was made; advance learning rate schedules only then.
  StepResult step(torch::optim::Optimizer& optimizer);
  /// Ends the step: reduces the scale if a gradient of any optimizer was not finite, and increases it after
  /// growth_interval consecutive steps in which all were finite.
  void update();
  /// Ends the step and sets the scale to `new_scale`.
  void update(double new_scale);

  bool is_enabled() const { return enabled_; }
  /// The scale; 1 if disabled. May block until a device is done.
  double get_scale() const;
  double get_growth_factor() const { return state_.growth_factor; }
  double get_backoff_factor() const { return state_.backoff_factor; }
  std::int64_t get_growth_interval() const { return state_.growth_interval; }
  // The setters take effect at once. They throw UsageError for values outside their range.
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(std::int64_t interval);

  /// Returns the entries of state_dict() of PyTorch's GradScaler: "scale", "growth_factor", "backoff_factor",
  /// "growth_interval" and "_growth_tracker", the number of steps since the scale changed. Call it between steps.
  /// Returns no entries if disabled.
  checkpoint::StateDict state_dict() const override;
  /// Does nothing if disabled. Throws UsageError, and changes nothing, for entries that are missing, unknown or of
  /// another type, and for values outside their range. The first three may also be integers.
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  struct State {
    double scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    std::int64_t growth_interval = 2000;
    std::int64_t growth_tracker = 0;  // steps since the scale changed, all with finite gradients
  };
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizerState {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_inf;  // by device: 1 if a gradient on it was not finite
  };

  void set_state(const State& state, const char* operation);
  void require_scale(const char* operation) const;
  std::vector<at::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer) const;
  std::vector<at::Tensor> all_reduce_found_inf(const std::vector<at::Tensor>& found_inf);
  bool all_finite(const std::vector<at::Tensor>& found_inf);

  const bool enabled_;
  const double warn_below_;
  std::optional<comm::Group> group_;
  State state_;                 // scale and growth_tracker are valid until the first loss
  at::Tensor scale_, tracker_;  // valid from the first loss on, on its device
  std::map<torch::optim::Optimizer*, PerOptimizerState> optimizers_;
  bool warned_ = false;
};

}  // namespace lockstep::amp
