// SGD: options, state and the scalars of its kernel.
#include "lockstep/optim/sgd.h"

#include <algorithm>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

torch::optim::SGDOptions to_torch_options(const SGDOptions& options) {
  base::check_option(options.lr >= 0, "SGD", "lr", options.lr, "0 or more");
  base::check_option(options.momentum >= 0, "SGD", "momentum", options.momentum, "0 or more");
  base::check_option(options.weight_decay >= 0, "SGD", "weight_decay", options.weight_decay, "0 or more");
  base::check_option(!options.nesterov || options.momentum > 0, "SGD", "momentum", options.momentum,
                     "more than 0 with nesterov");
  base::check_option(!options.nesterov || options.dampening == 0, "SGD", "dampening", options.dampening,
                     "0 with nesterov");
  torch::optim::SGDOptions converted(options.lr);
  copy_options(options, converted);
  return converted;
}

std::vector<ParamGroupOptions> param_group_options(const std::vector<SGD::Group>& groups) {
  std::vector<ParamGroupOptions> all;
  for (const SGD::Group& group : groups)
    all.emplace_back(group.parameters, std::make_unique<torch::optim::SGDOptions>(to_torch_options(group.options)));
  return all;
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
  std::int64_t step_count(const torch::optim::SGDParamState& state) const {
    return state.momentum_buffer().defined() ? 1 : 0;
  }
  std::vector<at::Tensor> state_tensors(const torch::optim::SGDParamState& state) const {
    return state_names().empty() ? std::vector<at::Tensor>() : std::vector<at::Tensor>{state.momentum_buffer()};
  }
  void write_state(torch::optim::SGDParamState& state, std::int64_t, const std::vector<at::Tensor>& states) const {
    if (!states.empty()) state.momentum_buffer(states[0]);
  }
};

std::vector<std::string> state_names(const SGDOptions& options, const std::vector<SGD::Group>& groups) {
  const bool momentum = options.momentum > 0 || std::any_of(groups.begin(), groups.end(), [](const auto& group) {
                          return group.options.momentum > 0;
                        });
  return momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>();
}

}  // namespace

SGD::SGD(std::shared_ptr<ddp::GradientSource> gradients, const SGDOptions& options, const std::vector<Group>& groups,
         const FusedOptions& fused)
    : torch::optim::SGD(make_param_groups(*gradients, param_group_options(groups)), to_torch_options(options)) {
  auto rule = std::make_unique<SgdUpdateRule>(*this, *gradients, kernels::kernels().sgd, state_names(options, groups));
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor SGD::step(LossClosure closure) { return fused_update().step(closure); }

void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::SGD::load(archive);
  import_loaded_state();
}

}  // namespace lockstep::optim
