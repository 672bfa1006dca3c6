// SGD: options, state and the scalars of its kernel.
#include "lockstep/optim/sgd.h"

#include <algorithm>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

torch::optim::SGDOptions checked_sgd_options(const SGDOptions& options) {
  check_not_negative("SGD",
                     {{"lr", options.lr}, {"momentum", options.momentum}, {"weight_decay", options.weight_decay}});
  base::check_option(!options.nesterov || options.momentum > 0, "SGD", "momentum", options.momentum,
                     "more than 0 with nesterov");
  base::check_option(!options.nesterov || options.dampening == 0, "SGD", "dampening", options.dampening,
                     "0 with nesterov");
  return to_torch_options<torch::optim::SGDOptions>(options);
}

class SgdUpdateRule final : public TorchUpdateRule<SgdUpdateRule, torch::optim::SGDOptions, torch::optim::SGDParamState,
                                                   kernels::SgdScalars> {
 public:
  using TorchUpdateRule::TorchUpdateRule;

  kernels::SgdScalars make_scalars(const torch::optim::SGDOptions& options, std::int64_t steps,
                                   std::vector<double>& numbers) const {
    if (options.momentum() != 0 && state_names().empty())
      throw base::UsageError("SGD: momentum is " + std::to_string(options.momentum()) +
                             "; expected 0, because no group had momentum at construction");
    numbers.insert(numbers.end(), {options.lr(), options.momentum(), options.dampening(), options.weight_decay(),
                                   static_cast<double>(options.nesterov()), static_cast<double>(steps)});
    return {.lr = options.lr(),
            .momentum = options.momentum(),
            .dampening = options.dampening(),
            .weight_decay = options.weight_decay(),
            .nesterov = options.nesterov(),
            .first = steps == 0};
  }
  bool can_skip_update(const kernels::SgdScalars& scalars) const {
    // If a first update with dampening were skipped, the next one would no longer be treated as the first.
    return !scalars.first || scalars.dampening == 0;
  }
  static auto state_tensors(torch::optim::SGDParamState& state) { return std::array{&state.momentum_buffer()}; }
};

std::vector<std::string> state_names(const SGDOptions& options, const std::vector<SGD::Group>& groups) {
  const bool momentum = options.momentum > 0 || std::any_of(groups.begin(), groups.end(), [](const auto& group) {
                          return group.options.momentum > 0;
                        });
  return momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>();
}

}  // namespace

template class FusedOptimizerOf<torch::optim::SGD, SGDOptions>;

SGD::SGD(std::shared_ptr<ddp::GradientSource> gradients, const SGDOptions& options, const std::vector<Group>& groups,
         const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_sgd_options), checked_sgd_options(options)) {
  initialize(gradients,
             std::make_unique<SgdUpdateRule>(*this, *gradients, kernels::kernels().sgd, state_names(options, groups)),
             fused);
}

}  // namespace lockstep::optim
