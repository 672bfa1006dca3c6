#include "lockstep/optim/schedules/scheduler.h"

#include <torch/optim/optimizer.h>

#include "lockstep/base/error.h"

namespace lockstep::optim::inline schedules {
namespace {

const std::string kBaseRatePrefix = "base_rate.";  // followed by the number of the group

}  // namespace

std::vector<double> get_learning_rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates,
                        const std::string& owner) {
  auto& groups = optimizer.param_groups();
  if (rates.size() != groups.size())
    throw base::UsageError(owner + ": there are learning rates for " + std::to_string(rates.size()) +
                           " groups; expected " + std::to_string(groups.size()) +
                           ", the number of groups of the optimizer");
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(rates[i]);
}

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
  set_step(0, get_learning_rates(optimizer));
}

void Scheduler::step() { set_step(step_ + 1, base_rates_); }

std::vector<double> Scheduler::rates() const { return get_learning_rates(optimizer_); }

checkpoint::StateDict Scheduler::state_dict() const {
  checkpoint::StateDict state = {{"step", step_}};
  for (std::size_t i = 0; i < base_rates_.size(); ++i) state[kBaseRatePrefix + std::to_string(i)] = base_rates_[i];
  return state;
}

void Scheduler::load_state_dict(const checkpoint::StateDict& state) {
  std::vector<double> base_rates;
  for (std::size_t i = 0; i + 1 < state.size(); ++i)
    base_rates.push_back(checkpoint::value_of<double>(state, kBaseRatePrefix + std::to_string(i)));
  set_step(checkpoint::value_of<std::int64_t>(state, "step"), base_rates);
}

void Scheduler::set_step(std::int64_t step, const std::vector<double>& base_rates) {
  base::check_option(step >= 0, "Scheduler", "step", static_cast<double>(step), "0 or more");
  std::vector<double> rates = base_rates;
  for (std::size_t i = 0; i < rates.size() && i < schedules_.size(); ++i) rates[i] = schedules_[i](step, rates[i]);
  set_learning_rates(optimizer_, rates, "Scheduler");
  step_ = step;
  base_rates_ = base_rates;
}

}  // namespace lockstep::optim::inline schedules
