// Scheduler: applies a schedule to the learning rates of an optimizer, and access to these rates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/optim/schedules/schedule.h"

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim::inline schedules {

/// Sets the learning rates of all groups of an optimizer, of torch or of this library, which must outlive this object.
/// A group's rate at construction is its base rate. All ranks must make the same calls. Does not block.
class Scheduler final : public checkpoint::Stateful {
 public:
  /// Sets the rates of step 0. Throws UsageError for an empty schedule.
  Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// Uses one schedule per group, in the order of the optimizer's param_groups(). Throws UsageError for another number
  /// of schedules.
  Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// Sets the rates of the next step; call it after optimizer.step().
  void step();
  /// The current rate of each group.
  std::vector<double> rates() const;

  /// Returns "step", the number of step() calls, and "base_rate.0", ..., the base rate of each group.
  checkpoint::StateDict state_dict() const override;
  /// Restores that state and overwrites the optimizer's rates. Throws UsageError, and changes nothing, for a step below
  /// 0, or unless there is one base rate per group.
  void load_state_dict(const checkpoint::StateDict& state) override;

 private:
  void set_step(std::int64_t step, const std::vector<double>& base_rates);

  torch::optim::Optimizer& optimizer_;
  const std::vector<Schedule> schedules_;
  std::int64_t step_ = 0;
  std::vector<double> base_rates_;  // by group
};

/// Returns the current rate of each group.
std::vector<double> get_learning_rates(const torch::optim::Optimizer& optimizer);
/// Throws a UsageError that begins with `owner`, and changes nothing, unless there is one rate per group.
void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates, const std::string& owner);

}  // namespace lockstep::optim::inline schedules
