// Construction of torch's parameter groups and checks of their options.
#include "lockstep/optim/fused/torch_update_rule.h"

#include <set>

namespace lockstep::optim::inline fused {

using base::UsageError;

std::vector<torch::optim::OptimizerParamGroup> make_param_groups(const ddp::GradientSource& source,
                                                                 std::vector<ParamGroupOptions> param_group_options) {
  const auto all = source.parameters();
  std::set<const void*> left;
  for (const auto& parameter : all) left.insert(parameter.tensor.unsafeGetTensorImpl());
  std::vector<torch::optim::OptimizerParamGroup> named;
  for (std::size_t i = 0; i < param_group_options.size(); ++i) {
    for (const at::Tensor& tensor : param_group_options[i].first)
      if (left.erase(tensor.unsafeGetTensorImpl()) == 0)
        throw UsageError(
            "lockstep::optim: group " + std::to_string(i) +
            " lists a parameter that does not belong to the DistributedDataParallel or is in an earlier group");
    named.emplace_back(std::move(param_group_options[i].first), std::move(param_group_options[i].second));
  }
  std::vector<at::Tensor> rest;
  for (const auto& parameter : all)
    if (left.contains(parameter.tensor.unsafeGetTensorImpl())) rest.push_back(parameter.tensor);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!rest.empty()) groups.emplace_back(std::move(rest));
  groups.insert(groups.end(), std::make_move_iterator(named.begin()), std::make_move_iterator(named.end()));
  return groups;
}

void check_not_negative(const std::string& optimizer, const std::vector<std::pair<std::string, double>>& options) {
  for (const auto& [name, value] : options) base::check_option(value >= 0, optimizer, name, value, "0 or more");
}

void check_betas(const std::string& optimizer, const std::array<double, 2>& betas) {
  for (const double beta : betas)
    base::check_option(beta >= 0 && beta < 1, optimizer, "one of betas", beta, "0 or more and less than 1");
}

}  // namespace lockstep::optim::inline fused
