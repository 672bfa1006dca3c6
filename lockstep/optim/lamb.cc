#include "lockstep/optim/lamb.h"

#include <torch/optim/adam.h>

#include <cmath>

#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using Options = GroupOptions<LAMBOptions>;
using State = torch::optim::AdamParamState;  // the same moments

std::unique_ptr<Options> checked(const LAMBOptions& options) {
  require(options.lr >= 0, "LAMB", "lr", options.lr, "0 or more");
  for (const double beta : options.betas)
    require(beta >= 0 && beta < 1, "LAMB", "one of betas", beta, "0 or more and less than 1");
  require(options.eps >= 0, "LAMB", "eps", options.eps, "0 or more");
  require(options.weight_decay >= 0, "LAMB", "weight_decay", options.weight_decay, "0 or more");
  return std::make_unique<Options>(options);
}

std::vector<Wanted> wanted(const std::vector<LAMB::Group>& groups) {
  std::vector<Wanted> all;
  for (const LAMB::Group& group : groups) all.emplace_back(group.parameters, checked(group.options));
  return all;
}

class LayerwiseRule final : public TorchRule<Options, State, LambRule> {
 public:
  LayerwiseRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source)
      : TorchRule(optimizer, source, {"exp_avg", "exp_avg_sq"}) {}

  bool measures() const override { return true; }
  Squares measure(std::size_t part, const Run& run) const override { return optim::measure(run, scalars(part)); }
  void measured(std::size_t part, const Squares& squares) override {
    LambRule& rule = scalars(part);
    rule.ratio = rule.adapt && squares.parameter != 0 && squares.step != 0
                     ? std::sqrt(squares.parameter) / std::sqrt(squares.step)
                     : 1;
  }

 private:
  LambRule read(const Options& options, std::int64_t steps, std::vector<double>& numbers) const override {
    const LAMBOptions& values = options.values;
    each(values, [&](const char*, auto value) { numbers.push_back(static_cast<double>(value)); });
    numbers.push_back(static_cast<double>(steps));
    const auto now = static_cast<double>(steps + 1);
    return {.lr = values.lr,
            .beta1 = values.betas[0],
            .beta2 = values.betas[1],
            .eps = values.eps,
            .weight_decay = values.weight_decay,
            .bias1 = values.bias_correction ? 1 - std::pow(values.betas[0], now) : 1,
            .bias2 = values.bias_correction ? 1 - std::pow(values.betas[1], now) : 1,
            .correct_bias = values.bias_correction,
            .adapt = values.adapt,
            .ratio = 1};
  }
  bool skips(const LambRule&) const override { return true; }
  std::int64_t count(const State& state) const override { return state.step(); }
  std::vector<at::Tensor> list(const State& state) const override { return {state.exp_avg(), state.exp_avg_sq()}; }
  void store(State& state, std::int64_t steps, const std::vector<at::Tensor>& states) const override {
    state.step(steps);
    state.exp_avg(states[0]);
    state.exp_avg_sq(states[1]);
  }
};

}  // namespace

LAMB::LAMB(std::shared_ptr<ddp::GradientSource> gradients, const LAMBOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Optimizer(make_groups(*gradients, wanted(groups)), checked(options)) {
  auto rule = std::make_unique<LayerwiseRule>(*this, *gradients);
  start(std::move(gradients), std::move(rule), fused);
}

torch::Tensor LAMB::step(LossClosure closure) { return step_fused(closure); }

void LAMB::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

void LAMB::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
  adopt_loaded();
}

}  // namespace lockstep::optim
