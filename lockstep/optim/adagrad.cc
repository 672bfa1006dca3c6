#include "lockstep/optim/adagrad.h"

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

torch::optim::AdagradOptions to_torch_options(const AdagradOptions& options) {
  base::check_option(options.lr >= 0, "Adagrad", "lr", options.lr, "0 or more");
  base::check_option(options.lr_decay >= 0, "Adagrad", "lr_decay", options.lr_decay, "0 or more");
  base::check_option(options.weight_decay >= 0, "Adagrad", "weight_decay", options.weight_decay, "0 or more");
  base::check_option(options.initial_accumulator_value >= 0, "Adagrad", "initial_accumulator_value",
                     options.initial_accumulator_value, "0 or more");
  base::check_option(options.eps >= 0, "Adagrad", "eps", options.eps, "0 or more");
  torch::optim::AdagradOptions converted;
  copy_options(options, converted);
  return converted;
}

std::vector<ParamGroupOptions> param_group_options(const AdagradOptions& options,
                                                   const std::vector<Adagrad::Group>& groups) {
  std::vector<ParamGroupOptions> all;
  for (const Adagrad::Group& group : groups) {
    base::check_option(group.options.initial_accumulator_value == options.initial_accumulator_value, "Adagrad",
                       "initial_accumulator_value of a group", group.options.initial_accumulator_value,
                       "the optimizer's, " + std::to_string(options.initial_accumulator_value));
    all.emplace_back(group.parameters, std::make_unique<torch::optim::AdagradOptions>(to_torch_options(group.options)));
  }
  return all;
}

class AdagradUpdateRule final : public TorchUpdateRule<AdagradUpdateRule, torch::optim::AdagradOptions,
                                                       torch::optim::AdagradParamState, kernels::AdagradScalars> {
 public:
  AdagradUpdateRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source, double initial)
      : TorchUpdateRule(optimizer, source, kernels::kernels().adagrad, {"sum"}), initial_(initial) {}

  double initial_state() const override { return initial_; }

  kernels::AdagradScalars make_scalars(const torch::optim::AdagradOptions& options, std::int64_t steps,
                                       std::vector<double>& numbers) const {
    numbers.insert(numbers.end(), {options.lr(), options.lr_decay(), options.weight_decay(), options.eps(),
                                   static_cast<double>(steps)});
    return {.current_lr = options.lr() / (1 + static_cast<double>(steps) * options.lr_decay()),
            .lr = options.lr(),
            .lr_decay = options.lr_decay(),
            .eps = options.eps(),
            .weight_decay = options.weight_decay()};
  }
  bool can_skip_update(const kernels::AdagradScalars&) const { return true; }
  std::int64_t step_count(const torch::optim::AdagradParamState& state) const { return state.step(); }
  std::vector<at::Tensor> state_tensors(const torch::optim::AdagradParamState& state) const { return {state.sum()}; }
  void write_state(torch::optim::AdagradParamState& state, std::int64_t steps,
                   const std::vector<at::Tensor>& states) const {
    state.step(steps);
    state.sum(states[0]);
  }

 private:
  const double initial_;
};

}  // namespace

Adagrad::Adagrad(std::shared_ptr<ddp::GradientSource> gradients, const AdagradOptions& options,
                 const std::vector<Group>& groups, const FusedOptions& fused)
    : torch::optim::Adagrad(make_param_groups(*gradients, param_group_options(options, groups)),
                            to_torch_options(options)) {
  state().clear();  // torch's constructor allocates state; ParameterStorage holds it instead
  auto rule = std::make_unique<AdagradUpdateRule>(*this, *gradients, options.initial_accumulator_value);
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor Adagrad::step(LossClosure closure) { return fused_update().step(closure); }

void Adagrad::load(torch::serialize::InputArchive& archive) {
  torch::optim::Adagrad::load(archive);
  import_loaded_state();
}

}  // namespace lockstep::optim
