#include "lockstep/optim/schedules/learning_rates.h"

#include <torch/optim/optimizer.h>

#include "lockstep/base/error.h"

namespace lockstep::optim::inline schedules {

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

}  // namespace lockstep::optim::inline schedules
