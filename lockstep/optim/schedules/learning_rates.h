// Reads and writes the learning rates of an optimizer's parameter groups.
#pragma once

#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace lockstep::optim {

std::vector<double> get_learning_rates(const torch::optim::Optimizer& optimizer);
/// Throws UsageError, which begins with `owner`, unless there is one rate per group; nothing has changed then.
void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates, const std::string& owner);

}  // namespace lockstep::optim
