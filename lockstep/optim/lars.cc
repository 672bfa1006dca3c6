#include "lockstep/optim/lars.h"

#include <torch/optim/sgd.h>

#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using LarsGroupOptions = GroupOptions<LARSOptions>;
using LarsState = torch::optim::SGDParamState;  // it has the same momentum buffer

std::unique_ptr<LarsGroupOptions> validated_options(const LARSOptions& options) {
  base::check_option(options.lr >= 0, "LARS", "lr", options.lr, "0 or more");
  base::check_option(options.momentum >= 0, "LARS", "momentum", options.momentum, "0 or more");
  base::check_option(options.weight_decay >= 0, "LARS", "weight_decay", options.weight_decay, "0 or more");
  base::check_option(options.trust_coefficient > 0, "LARS", "trust_coefficient", options.trust_coefficient,
                     "more than 0");
  base::check_option(options.eps >= 0, "LARS", "eps", options.eps, "0 or more");
  base::check_option(!options.nesterov || options.momentum > 0, "LARS", "momentum", options.momentum,
                     "more than 0 with nesterov");
  return std::make_unique<LarsGroupOptions>(options);
}

std::vector<ParamGroupOptions> param_group_options(const std::vector<LARS::Group>& groups) {
  std::vector<ParamGroupOptions> all;
  for (const LARS::Group& group : groups) all.emplace_back(group.parameters, validated_options(group.options));
  return all;
}

class LarsUpdateRule final : public TorchUpdateRule<LarsUpdateRule, LarsGroupOptions, LarsState, kernels::LarsScalars> {
 public:
  LarsUpdateRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source)
      : TorchUpdateRule(optimizer, source, kernels::kernels().lars, {"momentum_buffer"}) {}

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
  bool can_skip_update(const kernels::LarsScalars&) const { return true; }
  std::int64_t step_count(const LarsState& state) const { return state.momentum_buffer().defined() ? 1 : 0; }
  std::vector<at::Tensor> state_tensors(const LarsState& state) const { return {state.momentum_buffer()}; }
  void write_state(LarsState& state, std::int64_t, const std::vector<at::Tensor>& states) const {
    state.momentum_buffer(states[0]);
  }
};

}  // namespace

LARS::LARS(std::shared_ptr<ddp::GradientSource> gradients, const LARSOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Optimizer(make_param_groups(*gradients, param_group_options(groups)), validated_options(options)) {
  auto rule = std::make_unique<LarsUpdateRule>(*this, *gradients);
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor LARS::step(LossClosure closure) { return fused_update().step(closure); }

void LARS::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LarsState, LarsGroupOptions>(archive, *this);
}

void LARS::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LarsState, LarsGroupOptions>(archive, *this);
  import_loaded_state();
}

}  // namespace lockstep::optim
