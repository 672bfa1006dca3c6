#include "lockstep/optim/adam.h"

#include <algorithm>
#include <cmath>

#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

template <typename Torch, typename Options>
Torch of_torch(const Options& options, const std::string& name) {
  require(options.lr >= 0, name, "lr", options.lr, "0 or more");
  require(options.eps >= 0, name, "eps", options.eps, "0 or more");
  for (const double beta : options.betas)
    require(beta >= 0 && beta < 1, name, "one of betas", beta, "0 or more and less than 1");
  require(options.weight_decay >= 0, name, "weight_decay", options.weight_decay, "0 or more");
  return Torch(options.lr)
      .betas({options.betas[0], options.betas[1]})
      .eps(options.eps)
      .weight_decay(options.weight_decay)
      .amsgrad(options.amsgrad);
}

template <typename Torch, typename Group>
std::vector<Wanted> wanted(const std::vector<Group>& groups, const std::string& name) {
  std::vector<Wanted> all;
  for (const Group& group : groups)
    all.emplace_back(group.parameters, std::make_unique<Torch>(of_torch<Torch>(group.options, name)));
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
class MomentsRule final : public TorchRule<Options, State, AdamRule> {
 public:
  using TorchRule<Options, State, AdamRule>::TorchRule;

 private:
  AdamRule read(const Options& options, std::int64_t steps, std::vector<double>& numbers) const override {
    if (options.amsgrad() && this->state_names().size() < 3)
      throw base::UsageError("Adam: amsgrad is true; allowed is false for an optimizer that was made without");
    const auto [beta1, beta2] = options.betas();
    numbers.insert(numbers.end(), {options.lr(), beta1, beta2, options.eps(), options.weight_decay(),
                                   static_cast<double>(options.amsgrad()), static_cast<double>(steps)});
    const auto now = static_cast<double>(steps + 1);
    return {.lr = options.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = options.eps(),
            .weight_decay = options.weight_decay(),
            .bias1 = 1 - std::pow(beta1, now),
            .bias2 = 1 - std::pow(beta2, now),
            .decoupled = decoupled,
            .amsgrad = options.amsgrad()};
  }
  bool skips(const AdamRule&) const override { return true; }
  std::int64_t count(const State& state) const override { return state.step(); }
  std::vector<at::Tensor> list(const State& state) const override {
    std::vector<at::Tensor> all = {state.exp_avg(), state.exp_avg_sq()};
    if (this->state_names().size() > 2) all.push_back(state.max_exp_avg_sq());
    return all;
  }
  void store(State& state, std::int64_t steps, const std::vector<at::Tensor>& states) const override {
    state.step(steps);
    state.exp_avg(states[0]);
    state.exp_avg_sq(states[1]);
    if (states.size() > 2) state.max_exp_avg_sq(states[2]);
  }
};

using PlainRule = MomentsRule<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
using DecoupledRule = MomentsRule<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;

}  // namespace

Adam::Adam(std::shared_ptr<ddp::GradientSource> gradients, const AdamOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Adam(make_groups(*gradients, wanted<torch::optim::AdamOptions>(groups, "Adam")),
                         of_torch<torch::optim::AdamOptions>(options, "Adam")) {
  auto rule = std::make_unique<PlainRule>(*this, *gradients, state_names(options, groups));
  start(std::move(gradients), std::move(rule), fused);
}

torch::Tensor Adam::step(LossClosure closure) { return step_fused(closure); }

void Adam::save(torch::serialize::OutputArchive& archive) const {
  settle();
  torch::optim::Adam::save(archive);
}

void Adam::load(torch::serialize::InputArchive& archive) {
  torch::optim::Adam::load(archive);
  adopt_loaded();
}

AdamW::AdamW(std::shared_ptr<ddp::GradientSource> gradients, const AdamWOptions& options,
             const std::vector<Group>& groups, const FusedOptions& fused)
    : torch::optim::AdamW(make_groups(*gradients, wanted<torch::optim::AdamWOptions>(groups, "AdamW")),
                          of_torch<torch::optim::AdamWOptions>(options, "AdamW")) {
  auto rule = std::make_unique<DecoupledRule>(*this, *gradients, state_names(options, groups));
  start(std::move(gradients), std::move(rule), fused);
}

torch::Tensor AdamW::step(LossClosure closure) { return step_fused(closure); }

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  settle();
  torch::optim::AdamW::save(archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::AdamW::load(archive);
  adopt_loaded();
}

}  // namespace lockstep::optim
