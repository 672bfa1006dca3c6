#include "lockstep/optim/lars.h"

#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using LarsGroupOptions = GroupOptions<LARSOptions>;
using LarsState = torch::optim::SGDParamState;

LarsGroupOptions checked_lars_options(const LARSOptions& options) {
  check_not_negative("LARS", {{"lr", options.lr},
                              {"momentum", options.momentum},
                              {"weight_decay", options.weight_decay},
                              {"eps", options.eps}});
  base::check_option(options.trust_coefficient > 0, "LARS", "trust_coefficient", options.trust_coefficient,
                     "more than 0");
  base::check_option(!options.nesterov || options.momentum > 0, "LARS", "momentum", options.momentum,
                     "more than 0 with nesterov");
  return LarsGroupOptions(options);
}

class LarsUpdateRule final : public TorchUpdateRule<LarsUpdateRule, LarsGroupOptions, LarsState, kernels::LarsScalars> {
 public:
  using TorchUpdateRule::TorchUpdateRule;

  bool needs_norms() const override { return true; }
  kernels::SquaredNorms measure_norms(std::size_t index, const kernels::KernelArgs& args) const override {
    return kernels::kernels().measure_lars(args, scalars(index));
  }
  void set_norms(std::size_t index, const kernels::SquaredNorms& squares) override {
    kernels::LarsScalars& values = scalars(index);
    const double weights = std::sqrt(squares.parameter), gradient = std::sqrt(squares.step);
    values.trust_ratio =
        values.adapt && weights != 0 && gradient != 0
            ? values.trust_coefficient * weights / (gradient + values.weight_decay * weights + values.eps)
            : 1;
  }

  kernels::LarsScalars make_scalars(const LarsGroupOptions& options, std::int64_t steps,
                                    std::vector<double>& numbers) const {
    const LARSOptions& values = options.values;
    visit_options(values, [&](const char*, auto value) { numbers.push_back(static_cast<double>(value)); });
    numbers.push_back(static_cast<double>(steps));
    return {.lr = values.lr,
            .momentum = values.momentum,
            .weight_decay = values.weight_decay,
            .trust_coefficient = values.trust_coefficient,
            .eps = values.eps,
            .nesterov = values.nesterov,
            .adapt = values.adapt,
            .first = steps == 0,
            .trust_ratio = 1};
  }
  static auto state_tensors(LarsState& state) { return std::array{&state.momentum_buffer()}; }
};

}  // namespace

template class FusedOptimizerOf<CustomOptimizer<LARSOptions, torch::optim::SGDParamState>, LARSOptions>;

LARS::LARS(std::shared_ptr<ddp::GradientSource> gradients, const LARSOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : FusedOptimizerOf(make_param_groups(*gradients, groups, checked_lars_options), checked_lars_options(options)) {
  const std::vector<std::string> state_names = {"momentum_buffer"};
  initialize(gradients, std::make_unique<LarsUpdateRule>(*this, *gradients, kernels::kernels().lars, state_names),
             fused);
}

}  // namespace lockstep::optim
