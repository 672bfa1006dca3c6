// What sets an optimizer's rates by a schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/optim/schedules/schedule.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim {

/// Drives the rates of all groups of an optimizer, torch's own or ours, which outlives it. What a group's rate is when
/// this is made is its base. All ranks make it alike and call step() alike; it waits for nobody.
class Scheduler {
 public:
  /// Sets the rates of step 0. Throws UsageError.
  Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// With a schedule for each group, in the order of its param_groups().
  Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// After optimizer.step(): sets the rates of the next step.
  void step();
  /// Of the groups, as they are now.
  std::vector<double> rates() const;

  /// All that a checkpoint needs.
  struct Position {
    std::int64_t step = 0;
    std::vector<double> base_lrs;  ///< of the groups
  };
  Position position() const { return position_; }
  /// Goes on from there, whatever the optimizer's rates are. Throws UsageError for a step before 0 or when there are
  /// not as many rates as groups: nothing has changed then.
  void resume(const Position& position);

 private:
  torch::optim::Optimizer& optimizer_;
  const std::vector<Schedule> schedules_;
  Position position_;
};

}  // namespace lockstep::optim
