#include "lockstep/optim/adagrad.h"

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

torch::optim::AdagradOptions checked_adagrad_options(const AdagradOptions& options) {
  check_not_negative("Adagrad", {{"lr", options.lr},
                                 {"lr_decay", options.lr_decay},
                                 {"weight_decay", options.weight_decay},
                                 {"initial_accumulator_value", options.initial_accumulator_value},
                                 {"eps", options.eps}});
  return to_torch_options<torch::optim::AdagradOptions>(options);
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
  static auto state_tensors(torch::optim::AdagradParamState& state) { return std::array{&state.sum()}; }

 private:
  const double initial_;
};

}  // namespace

template class FusedOptimizerOf<torch::optim::Adagrad, AdagradOptions>;

Adagrad::Adagrad(std::shared_ptr<ddp::GradientSource> gradients, const AdagradOptions& options,
                 const std::vector<Group>& groups, const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_adagrad_options),
                       checked_adagrad_options(options)) {
  for (const Group& group : groups)
    base::check_option(group.options.initial_accumulator_value == options.initial_accumulator_value, "Adagrad",
                       "initial_accumulator_value of a group", group.options.initial_accumulator_value,
                       "the optimizer's, " + std::to_string(options.initial_accumulator_value));
  state().clear();  // torch's constructor allocates state; ParameterStorage holds it instead
  initialize(gradients, std::make_unique<AdagradUpdateRule>(*this, *gradients, options.initial_accumulator_value),
             fused);
}

}  // namespace lockstep::optim
