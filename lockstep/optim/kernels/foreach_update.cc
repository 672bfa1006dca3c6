#include "lockstep/optim/kernels/foreach_update.h"

#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <utility>

namespace lockstep::optim {
namespace {

std::optional<at::Tensor> found_inf(const TensorRun& run) {
  return run.skip.defined() ? std::optional(run.skip) : std::nullopt;
}

/// ATen's fused updates read the counts, and leave counting to the caller.
template <typename Update>
void counted(const TensorRun& run, const Update& update) {
  at::_foreach_add_(run.steps, 1);
  update();
  if (run.skip.defined()) at::_foreach_sub_(run.steps, std::vector<at::Tensor>(run.steps.size(), run.skip));
}

/// For updates that have no `skip` of their own: where it says so, everything becomes what it was.
class Before {
 public:
  explicit Before(const TensorRun& run) : skip_(run.skip) {
    if (!skip_.defined()) return;
    keep(run.parameters);
    for (const auto& states : run.states) keep(states);
  }
  void put_back() const {
    for (const auto& [now, before] : kept_) now.copy_(at::where(skip_.ne(0), before, now));
  }

 private:
  void keep(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) kept_.emplace_back(tensor, tensor.clone());
  }

  const at::Tensor skip_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

/// 1 - beta^n of each tensor, n updates with this one.
at::Tensor bias(const TensorRun& run, double beta) {
  return at::pow(beta, at::stack(run.steps).to(at::kDouble)).neg_().add_(1).to(run.parameters.front().scalar_type());
}

/// a / b of norms of each tensor, and 1 where one of them is 0.
std::vector<at::Tensor> ratios(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ratio) {
  return at::where(a.ne(0).logical_and(b.ne(0)), ratio, at::ones_like(ratio)).unbind();
}

}  // namespace

void update(const TensorRun& run, const SgdRule& rule) {
  const std::vector<at::Tensor> momentum = rule.momentum == 0 ? std::vector<at::Tensor>() : run.states[0];
  counted(run, [&] {
    at::_fused_sgd_(run.parameters, run.gradients, momentum, rule.weight_decay, rule.momentum, rule.lr, rule.dampening,
                    rule.nesterov, /*maximize=*/false, rule.first, {}, found_inf(run));
  });
}

void update(const TensorRun& run, const AdamRule& rule) {
  const std::vector<at::Tensor> greatest = rule.amsgrad ? run.states[2] : std::vector<at::Tensor>();
  const auto with = [&](const auto& fused) {
    fused(run.parameters, run.gradients, run.states[0], run.states[1], greatest, run.steps, rule.lr, rule.beta1,
          rule.beta2, rule.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false, std::optional<at::Tensor>(),
          found_inf(run));
  };
  counted(run, [&] {
    if (rule.decoupled)
      with([](const auto&... all) { at::_fused_adamw_(all...); });
    else
      with([](const auto&... all) { at::_fused_adam_(all...); });
  });
}

void update(const TensorRun& run, const AdagradRule& rule) {
  counted(run, [&] {
    at::_fused_adagrad_(run.parameters, run.gradients, run.states[0], run.steps, rule.lr, rule.lr_decay,
                        rule.weight_decay, rule.eps, /*maximize=*/false, {}, found_inf(run));
  });
}

void update(const TensorRun& run, const LambRule& rule) {
  const Before before(run);
  const auto& first = run.states[0];
  const auto& second = run.states[1];
  counted(run, [&] {
    at::_foreach_lerp_(first, run.gradients, 1 - rule.beta1);
    at::_foreach_mul_(second, rule.beta2);
    at::_foreach_addcmul_(second, run.gradients, run.gradients, 1 - rule.beta2);
    std::vector<at::Tensor> below = at::_foreach_sqrt(second);
    if (rule.correct_bias) at::_foreach_div_(below, bias(run, rule.beta2).sqrt_().unbind());
    at::_foreach_add_(below, rule.eps);
    std::vector<at::Tensor> step = at::_foreach_div(first, below);
    if (rule.correct_bias) at::_foreach_div_(step, bias(run, rule.beta1).unbind());
    if (rule.weight_decay != 0) at::_foreach_add_(step, run.parameters, rule.weight_decay);
    if (rule.adapt) {
      const at::Tensor of_parameters = at::stack(at::_foreach_norm(run.parameters)),
                       of_steps = at::stack(at::_foreach_norm(step));
      at::_foreach_mul_(step, ratios(of_parameters, of_steps, of_parameters / of_steps));
    }
    at::_foreach_add_(run.parameters, step, -rule.lr);
  });
  before.put_back();
}

void update(const TensorRun& run, const LarsRule& rule) {
  const Before before(run);
  const auto& momentum = run.states[0];
  counted(run, [&] {
    std::vector<at::Tensor> step = at::_foreach_add(run.gradients, run.parameters, rule.weight_decay);
    if (rule.adapt) {
      const at::Tensor weights = at::stack(at::_foreach_norm(run.parameters)),
                       gradients = at::stack(at::_foreach_norm(run.gradients));
      at::_foreach_mul_(step, ratios(weights, gradients,
                                     rule.trust * weights / (gradients + rule.weight_decay * weights + rule.eps)));
    }
    at::_foreach_mul_(momentum, rule.momentum);  // of zeros, before the first update
    at::_foreach_add_(momentum, step);
    if (rule.nesterov)
      at::_foreach_add_(step, momentum, rule.momentum);
    else
      step = momentum;
    at::_foreach_add_(run.parameters, step, -rule.lr);
  });
  before.put_back();
}

}  // namespace lockstep::optim
