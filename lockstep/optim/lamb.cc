#include "lockstep/optim/lamb.h"

#include <torch/optim/adam.h>

#include <cmath>

#include "lockstep/optim/fused/fused_update.h"
#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using LambGroupOptions = GroupOptions<LAMBOptions>;
using LambState = torch::optim::AdamParamState;  // it has the same two moments

std::unique_ptr<LambGroupOptions> validated_options(const LAMBOptions& options) {
  base::check_option(options.lr >= 0, "LAMB", "lr", options.lr, "0 or more");
  for (const double beta : options.betas)
    base::check_option(beta >= 0 && beta < 1, "LAMB", "one of betas", beta, "0 or more and less than 1");
  base::check_option(options.eps >= 0, "LAMB", "eps", options.eps, "0 or more");
  base::check_option(options.weight_decay >= 0, "LAMB", "weight_decay", options.weight_decay, "0 or more");
  return std::make_unique<LambGroupOptions>(options);
}

std::vector<ParamGroupOptions> param_group_options(const std::vector<LAMB::Group>& groups) {
  std::vector<ParamGroupOptions> all;
  for (const LAMB::Group& group : groups) all.emplace_back(group.parameters, validated_options(group.options));
  return all;
}

class LambUpdateRule final : public TorchUpdateRule<LambUpdateRule, LambGroupOptions, LambState, kernels::LambScalars> {
 public:
  LambUpdateRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source)
      : TorchUpdateRule(optimizer, source, kernels::kernels().lamb, {"exp_avg", "exp_avg_sq"}) {}

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
  bool can_skip_update(const kernels::LambScalars&) const { return true; }
  std::int64_t step_count(const LambState& state) const { return state.step(); }
  std::vector<at::Tensor> state_tensors(const LambState& state) const { return {state.exp_avg(), state.exp_avg_sq()}; }
  void write_state(LambState& state, std::int64_t steps, const std::vector<at::Tensor>& states) const {
    state.step(steps);
    state.exp_avg(states[0]);
    state.exp_avg_sq(states[1]);
  }
};

}  // namespace

LAMB::LAMB(std::shared_ptr<ddp::GradientSource> gradients, const LAMBOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Optimizer(make_param_groups(*gradients, param_group_options(groups)), validated_options(options)) {
  auto rule = std::make_unique<LambUpdateRule>(*this, *gradients);
  initialize(std::move(gradients), std::move(rule), fused);
}

torch::Tensor LAMB::step(LossClosure closure) { return fused_update().step(closure); }

void LAMB::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LambState, LambGroupOptions>(archive, *this);
}

void LAMB::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LambState, LambGroupOptions>(archive, *this);
  import_loaded_state();
}

}  // namespace lockstep::optim
