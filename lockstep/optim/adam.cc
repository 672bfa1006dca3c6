// Adam and AdamW: options, state and the scalars of their kernel.
#include "lockstep/optim/adam.h"

#include <algorithm>
#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

template <typename Torch, typename Options>
Torch to_torch_options(const Options& options, const std::string& name) {
  base::check_option(options.lr >= 0, name, "lr", options.lr, "0 or more");
  base::check_option(options.eps >= 0, name, "eps", options.eps, "0 or more");
  for (const double beta : options.betas)
    base::check_option(beta >= 0 && beta < 1, name, "one of betas", beta, "0 or more and less than 1");
  base::check_option(options.weight_decay >= 0, name, "weight_decay", options.weight_decay, "0 or more");
  Torch converted;
  copy_options(options, converted);
  return converted;
}

template <typename Torch, typename Group>
std::vector<ParamGroupOptions> param_group_options(const std::vector<Group>& groups, const std::string& name) {
  std::vector<ParamGroupOptions> all;
  for (const Group& group : groups)
    all.emplace_back(group.parameters, std::make_unique<Torch>(to_torch_options<Torch>(group.options, name)));
  return all;
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
  bool can_skip_update(const kernels::AdamScalars&) const { return true; }
  std::int64_t step_count(const State& state) const { return state.step(); }
  std::vector<at::Tensor> state_tensors(const State& state) const {
    std::vector<at::Tensor> all = {state.exp_avg(), state.exp_avg_sq()};
    if (this->state_names().size() > 2) all.push_back(state.max_exp_avg_sq());
    return all;
  }
  void write_state(State& state, std::int64_t steps, const std::vector<at::Tensor>& states) const {
    state.step(steps);
    state.exp_avg(states[0]);
    state.exp_avg_sq(states[1]);
    if (states.size() > 2) state.max_exp_avg_sq(states[2]);
  }
};

using AdamUpdateRule = AdamFamilyUpdateRule<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
using AdamWUpdateRule = AdamFamilyUpdateRule<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;

}  // namespace

Adam::Adam(std::shared_ptr<ddp::GradientSource> gradients, const AdamOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Adam(make_param_groups(*gradients, param_group_options<torch::optim::AdamOptions>(groups, "Adam")),
                         to_torch_options<torch::optim::AdamOptions>(options, "Adam")) {
  auto rule =
      std::make_unique<AdamUpdateRule>(*this, *gradients, kernels::kernels().adam, state_names(options, groups));
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor Adam::step(LossClosure closure) { return fused_update().step(closure); }

void Adam::save(torch::serialize::OutputArchive& archive) const {
  sync_step_counts();
  torch::optim::Adam::save(archive);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  torch::optim::Adam::load(archive);
  import_loaded_state();
}

AdamW::AdamW(std::shared_ptr<ddp::GradientSource> gradients, const AdamWOptions& options,
             const std::vector<Group>& groups, const FusedOptions& fused)
    : torch::optim::AdamW(
          make_param_groups(*gradients, param_group_options<torch::optim::AdamWOptions>(groups, "AdamW")),
          to_torch_options<torch::optim::AdamWOptions>(options, "AdamW")) {
  auto rule =
      std::make_unique<AdamWUpdateRule>(*this, *gradients, kernels::kernels().adam, state_names(options, groups));
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor AdamW::step(LossClosure closure) { return fused_update().step(closure); }

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  sync_step_counts();
  torch::optim::AdamW::save(archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::AdamW::load(archive);
  import_loaded_state();
}

}  // namespace lockstep::optim
