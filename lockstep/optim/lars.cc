#include "lockstep/optim/lars.h"

#include <torch/optim/sgd.h>

#include <cmath>

#include "lockstep/optim/fused/torch_update_rule.h"

namespace lockstep::optim {
namespace {

using Options = GroupOptions<LARSOptions>;
using State = torch::optim::SGDParamState;  // the same momentum

std::unique_ptr<Options> checked(const LARSOptions& options) {
  require(options.lr >= 0, "LARS", "lr", options.lr, "0 or more");
  require(options.momentum >= 0, "LARS", "momentum", options.momentum, "0 or more");
  require(options.weight_decay >= 0, "LARS", "weight_decay", options.weight_decay, "0 or more");
  require(options.trust_coefficient > 0, "LARS", "trust_coefficient", options.trust_coefficient, "more than 0");
  require(options.eps >= 0, "LARS", "eps", options.eps, "0 or more");
  require(!options.nesterov || options.momentum > 0, "LARS", "momentum", options.momentum, "more than 0 with nesterov");
  return std::make_unique<Options>(options);
}

std::vector<Wanted> wanted(const std::vector<LARS::Group>& groups) {
  std::vector<Wanted> all;
  for (const LARS::Group& group : groups) all.emplace_back(group.parameters, checked(group.options));
  return all;
}

class LayerwiseRule final : public TorchRule<Options, State, LarsRule> {
 public:
  LayerwiseRule(torch::optim::Optimizer& optimizer, const ddp::GradientSource& source)
      : TorchRule(optimizer, source, {"momentum_buffer"}) {}

  bool measures() const override { return true; }
  Squares measure(std::size_t part, const Run& run) const override { return optim::measure(run, scalars(part)); }
  void measured(std::size_t part, const Squares& squares) override {
    LarsRule& rule = scalars(part);
    const double weights = std::sqrt(squares.parameter), gradient = std::sqrt(squares.step);
    rule.ratio = rule.adapt && weights != 0 && gradient != 0
                     ? rule.trust * weights / (gradient + rule.weight_decay * weights + rule.eps)
                     : 1;
  }

 private:
  LarsRule read(const Options& options, std::int64_t steps, std::vector<double>& numbers) const override {
    const LARSOptions& values = options.values;
    each(values, [&](const char*, auto value) { numbers.push_back(static_cast<double>(value)); });
    numbers.push_back(static_cast<double>(steps));
    return {.lr = values.lr,
            .momentum = values.momentum,
            .weight_decay = values.weight_decay,
            .trust = values.trust_coefficient,
            .eps = values.eps,
            .nesterov = values.nesterov,
            .adapt = values.adapt,
            .first = steps == 0,
            .ratio = 1};
  }
  bool skips(const LarsRule&) const override { return true; }
  std::int64_t count(const State& state) const override { return state.momentum_buffer().defined() ? 1 : 0; }
  std::vector<at::Tensor> list(const State& state) const override { return {state.momentum_buffer()}; }
  void store(State& state, std::int64_t, const std::vector<at::Tensor>& states) const override {
    state.momentum_buffer(states[0]);
  }
};

}  // namespace

LARS::LARS(std::shared_ptr<ddp::GradientSource> gradients, const LARSOptions& options, const std::vector<Group>& groups,
           const FusedOptions& fused)
    : torch::optim::Optimizer(make_groups(*gradients, wanted(groups)), checked(options)) {
  auto rule = std::make_unique<LayerwiseRule>(*this, *gradients);
  start(std::move(gradients), std::move(rule), fused);
}

torch::Tensor LARS::step(LossClosure closure) { return step_fused(closure); }

void LARS::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

void LARS::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
  adopt_loaded();
}

}  // namespace lockstep::optim
