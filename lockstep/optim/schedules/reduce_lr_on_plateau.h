// Rates that go down when a measured value does not get better any more.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim {

/// As torch.optim.lr_scheduler.ReduceLROnPlateau.
struct ReduceLROnPlateauOptions {
  bool maximize = false;            ///< more is better
  double factor = 0.1;              ///< by which rates are multiplied
  std::int64_t patience = 10;       ///< values in a row that may be no better
  double threshold = 1e-4;          ///< by which a value must be better than the best to count
  bool absolute_threshold = false;  ///< otherwise it is a part of the best
  std::int64_t cooldown = 0;        ///< values after a reduction that are not counted
  double min_lr = 0;
  double eps = 1e-8;  ///< a reduction by less is not made
};

/// What has been seen.
struct PlateauState {
  double best = std::numeric_limits<double>::infinity();  ///< with maximize it begins at minus infinity
  std::int64_t num_bad_values = 0;                        ///< values in a row that were no better
  std::int64_t cooldown_left = 0;
};
struct PlateauDecision {
  PlateauState state;
  bool reduce = false;
};
/// What `value` means after what has been seen. Pure. A NaN is no better than anything.
PlateauDecision evaluate_plateau(const ReduceLROnPlateauOptions& options, PlateauState state, double value);

/// Drives the rates of all groups of an optimizer, which outlives it. All ranks give it the same values: for instance a
/// mean by all_reduce().
class ReduceLROnPlateau {
 public:
  /// Throws UsageError.
  ReduceLROnPlateau(torch::optim::Optimizer& optimizer, const ReduceLROnPlateauOptions& options = {});

  /// After each evaluation. True when rates were reduced.
  bool step(double value);

  /// All that a checkpoint needs.
  struct Position {
    PlateauState state;
    std::vector<double> rates;  ///< of the groups
  };
  Position position() const;
  /// Goes on from there. Throws UsageError when there are not as many rates as groups: nothing has changed then.
  void resume(const Position& position);

 private:
  torch::optim::Optimizer& optimizer_;
  const ReduceLROnPlateauOptions options_;
  PlateauState state_;
};

}  // namespace lockstep::optim
