#include "lockstep/optim/lamb.h"

#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using LambGroupOptions = GroupOptions<LAMBOptions>;
using LambState = torch::optim::AdamParamState;

LambGroupOptions checked_lamb_options(const LAMBOptions& options) {
  check_not_negative("LAMB", {{"lr", options.lr}, {"eps", options.eps}, {"weight_decay", options.weight_decay}});
  check_betas("LAMB", options.betas);
  return LambGroupOptions(options);
}

class LambUpdateRule final : public TorchUpdateRule<LambUpdateRule, LambGroupOptions, LambState, kernels::LambScalars> {
 public:
  using TorchUpdateRule::TorchUpdateRule;

  bool needs_norms() const override { return true; }
  kernels::SquaredNorms measure_norms(std::size_t index, const kernels::KernelArgs& args) const override {
    return kernels::kernels().measure_lamb(args, scalars(index));
  }
  void set_norms(std::size_t index, const kernels::SquaredNorms& squares) override {
    kernels::LambScalars& values = scalars(index);
    values.trust_ratio = values.adapt && squares.parameter != 0 && squares.step != 0
                             ? std::sqrt(squares.parameter) / std::sqrt(squares.step)
                             : 1;
  }

  kernels::LambScalars make_scalars(const LambGroupOptions& options, std::int64_t steps,
                                    std::vector<double>& numbers) const {
    const LAMBOptions& values = options.values;
    visit_options(values, [&](const char*, auto value) { numbers.push_back(static_cast<double>(value)); });
    numbers.push_back(static_cast<double>(steps));
    const auto now = static_cast<double>(steps + 1);
    return {.lr = values.lr,
            .beta1 = values.betas[0],
            .beta2 = values.betas[1],
            .eps = values.eps,
            .weight_decay = values.weight_decay,
            .bias_correction1 = values.bias_correction ? 1 - std::pow(values.betas[0], now) : 1,
            .bias_correction2 = values.bias_correction ? 1 - std::pow(values.betas[1], now) : 1,
            .correct_bias = values.bias_correction,
            .adapt = values.adapt,
            .trust_ratio = 1};
  }
  static auto state_tensors(LambState& state) { return std::array{&state.exp_avg(), &state.exp_avg_sq()}; }
};

}  // namespace

template class FusedOptimizerOf<CustomOptimizer<LAMBOptions, torch::optim::AdamParamState>, LAMBOptions>;

LAMB::LAMB(std::shared_ptr<ddp::GradientSource> gradients, const LAMBOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_lamb_options), checked_lamb_options(options)) {
  const std::vector<std::string> state_names = {"exp_avg", "exp_avg_sq"};
  initialize(gradients, std::make_unique<LambUpdateRule>(*this, *gradients, kernels::kernels().lamb, state_names),
             fused);
}

}  // namespace lockstep::optim
