// Reads and writes the learning rates of an optimizer's parameter groups.
#pragma once

#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim::inline schedules {

/// Returns the current rate of each group.
std::vector<double> get_learning_rates(const torch::optim::Optimizer& optimizer);
/// Throws a UsageError that begins with `owner`, and changes nothing, unless there is one rate per group.
void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates, const std::string& owner);

}  // namespace lockstep::optim::inline schedules
