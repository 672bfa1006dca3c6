// Adam and AdamW: options, state and the scalars of their kernel.
#include "lockstep/optim/adam.h"

#include <algorithm>
#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

template <bool decoupled>
auto checked_adam_options(const AdamFamilyOptions<decoupled>& options) {
  const std::string name = decoupled ? "AdamW" : "Adam";
  check_not_negative(name, {{"lr", options.lr}, {"eps", options.eps}, {"weight_decay", options.weight_decay}});
  check_betas(name, options.betas);
  return to_torch_options<std::conditional_t<decoupled, torch::optim::AdamWOptions, torch::optim::AdamOptions>>(
      options);
}

template <typename Options, typename Group>
std::vector<std::string> state_names(const Options& options, const std::vector<Group>& groups) {
  std::vector<std::string> names = {"exp_avg", "exp_avg_sq"};
  if (options.amsgrad ||
      std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.options.amsgrad; }))
    names.push_back("max_exp_avg_sq");
  return names;
}

template <typename Options, typename State, bool decoupled>
class AdamFamilyUpdateRule final
    : public TorchUpdateRule<AdamFamilyUpdateRule<Options, State, decoupled>, Options, State, kernels::AdamScalars> {
 public:
  using AdamFamilyUpdateRule::TorchUpdateRule::TorchUpdateRule;

  kernels::AdamScalars make_scalars(const Options& options, std::int64_t steps, std::vector<double>& numbers) const {
    if (options.amsgrad() && this->state_names().size() < 3)
      throw base::UsageError("Adam: amsgrad is true; expected false, because no group had amsgrad at construction");
    const auto [beta1, beta2] = options.betas();
    numbers.insert(numbers.end(), {options.lr(), beta1, beta2, options.eps(), options.weight_decay(),
                                   static_cast<double>(options.amsgrad()), static_cast<double>(steps)});
    const auto now = static_cast<double>(steps + 1);
    return {.lr = options.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = options.eps(),
            .weight_decay = options.weight_decay(),
            .bias_correction1 = 1 - std::pow(beta1, now),
            .bias_correction2 = 1 - std::pow(beta2, now),
            .decoupled = decoupled,
            .amsgrad = options.amsgrad()};
  }
  static auto state_tensors(State& state) {
    return std::array{&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()};
  }
};

using AdamUpdateRule = AdamFamilyUpdateRule<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
using AdamWUpdateRule = AdamFamilyUpdateRule<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;

}  // namespace

template class FusedOptimizerOf<torch::optim::Adam, AdamOptions>;
template class FusedOptimizerOf<torch::optim::AdamW, AdamWOptions>;

Adam::Adam(std::shared_ptr<ddp::GradientSource> gradients, const AdamOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_adam_options<false>),
                       checked_adam_options<false>(options)) {
  initialize(gradients,
             std::make_unique<AdamUpdateRule>(*this, *gradients, kernels::kernels().adam, state_names(options, groups)),
             fused);
}

AdamW::AdamW(std::shared_ptr<ddp::GradientSource> gradients, const AdamWOptions& options,
             const std::vector<Group>& groups, const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_adam_options<true>),
                       checked_adam_options<true>(options)) {
  initialize(
      gradients,
      std::make_unique<AdamWUpdateRule>(*this, *gradients, kernels::kernels().adam, state_names(options, groups)),
      fused);
}

}  // namespace lockstep::optim
