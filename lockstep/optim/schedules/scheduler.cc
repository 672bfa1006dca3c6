// Evaluates schedules and writes the rates to the optimizer.
#include "lockstep/optim/schedules/scheduler.h"

#include <torch/optim/optimizer.h>

#include "lockstep/base/error.h"
#include "lockstep/base/option_check.h"
#include "lockstep/optim/schedules/learning_rates.h"

namespace lockstep::optim {

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : Scheduler(optimizer, std::vector<Schedule>(optimizer.param_groups().size(), std::move(schedule))) {}

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules)
    : optimizer_(optimizer), schedules_(std::move(schedules)) {
  for (const Schedule& schedule : schedules_)
    if (!schedule)
      throw base::UsageError("Scheduler: a schedule is empty; expected one function for all groups, or one per group");
  if (schedules_.size() != optimizer.param_groups().size())
    throw base::UsageError("Scheduler: there are " + std::to_string(schedules_.size()) + " schedules; expected " +
                           std::to_string(optimizer.param_groups().size()) +
                           ", the number of groups of the optimizer, or one for all groups");
  resume({0, get_learning_rates(optimizer)});
}

void Scheduler::step() { resume({position_.step + 1, position_.base_lrs}); }

std::vector<double> Scheduler::rates() const { return get_learning_rates(optimizer_); }

void Scheduler::resume(const Position& position) {
  base::check_option(position.step >= 0, "Scheduler", "step", static_cast<double>(position.step), "0 or more");
  std::vector<double> rates = position.base_lrs;
  for (std::size_t i = 0; i < rates.size() && i < schedules_.size(); ++i)
    rates[i] = schedules_[i](position.step, rates[i]);
  set_learning_rates(optimizer_, rates, "Scheduler");
  position_ = position;
}

}  // namespace lockstep::optim
