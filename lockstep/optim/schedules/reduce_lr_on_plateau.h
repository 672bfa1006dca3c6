// Reduces learning rates when a monitored value stops improving.
#pragma once

#include <cstdint>
#include <limits>

#include "lockstep/checkpoint/stateful.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim::inline schedules {

/// Options of torch.optim.lr_scheduler.ReduceLROnPlateau.
struct ReduceLROnPlateauOptions {
  bool maximize = false;            ///< greater values are better
  double factor = 0.1;              ///< a reduction multiplies the rates by this
  std::int64_t patience = 10;       ///< consecutive values without improvement that are tolerated
  double threshold = 1e-4;          ///< minimum improvement over the best value
  bool absolute_threshold = false;  ///< false: `threshold` is a fraction of the best value
  std::int64_t cooldown = 0;        ///< values after a reduction that do not count as bad
  double min_lr = 0;
  double eps = 1e-8;  ///< a reduction by this or less is skipped
};

/// The state of the scheduler: a summary of earlier values.
struct PlateauState {
  double best = std::numeric_limits<double>::infinity();  ///< starts at minus infinity with `maximize`
  std::int64_t num_bad_values = 0;                        ///< consecutive values without improvement
  std::int64_t cooldown_left = 0;
};
struct PlateauDecision {
  PlateauState state;
  bool reduce = false;
};
/// Adds `value` to `state` and decides whether to reduce the rates. A NaN never counts as an improvement. Pure.
PlateauDecision evaluate_plateau(const ReduceLROnPlateauOptions& options, PlateauState state, double value);

/// Reduces the learning rates of all groups of an optimizer, which must outlive this object. All ranks must pass the
/// same values, for example a mean computed with all_reduce().
class ReduceLROnPlateau final : public checkpoint::Stateful {
 public:
  /// Throws UsageError for an option outside its range.
  ReduceLROnPlateau(torch::optim::Optimizer& optimizer, const ReduceLROnPlateauOptions& options = {});

  /// Call it after each evaluation. Returns true if rates were reduced. Does not block.
  bool step(double value);

  /// Returns the fields of PlateauState and "rate.0", ..., the rate of each group.
  checkpoint::StateDict state_dict() const override;
  /// Restores that state and overwrites the optimizer's rates. Throws UsageError, and changes nothing, for missing
  /// values and unless there is one rate per group.
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  torch::optim::Optimizer& optimizer_;
  const ReduceLROnPlateauOptions options_;
  PlateauState state_;
};

}  // namespace lockstep::optim::inline schedules
