// Updates by ATen's fused and foreach operations, skipped on the device where found_inf is set.
#include "lockstep/optim/kernels/foreach_update.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

namespace lockstep::optim::kernels {
namespace {

std::optional<at::Tensor> optional_found_inf(const ForeachArgs& args) {
  return args.found_inf.defined() ? std::optional(args.found_inf) : std::nullopt;
}

/// Calls `update` with the learning rate: args.lr, or `lr` if that is undefined.
template <typename Update>
void with_lr(const ForeachArgs& args, double lr, const Update& update) {
  if (args.lr.defined())
    update(args.lr);
  else
    update(lr);
}

/// parameters -= learning rate * step
void subtract(const ForeachArgs& args, double lr, const std::vector<at::Tensor>& step) {
  if (args.lr.defined())
    at::_foreach_sub_(args.parameters, at::_foreach_mul(step, args.lr));
  else
    at::_foreach_add_(args.parameters, step, -lr);
}

/// Increments the step counts around `update`: ATen's fused updates only read them.
template <typename Update>
void with_step_counts(const ForeachArgs& args, const Update& update) {
  at::_foreach_add_(args.steps, 1);
  update();
  if (args.found_inf.defined())
    at::_foreach_sub_(args.steps, std::vector<at::Tensor>(args.steps.size(), args.found_inf));
}

/// Saves the tensors of an update that does not support found_inf, and restores them if found_inf is set.
class SkipRollback {
 public:
  explicit SkipRollback(const ForeachArgs& args) : found_inf_(args.found_inf) {
    if (!found_inf_.defined()) return;
    save(args.parameters);
    for (const auto& states : args.states) save(states);
  }
  void restore_if_skipped() const {
    for (const auto& [now, saved] : saved_) now.copy_(at::where(found_inf_.ne(0), saved, now));
  }

 private:
  void save(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) saved_.emplace_back(tensor, tensor.clone());
  }

  const at::Tensor found_inf_;
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;
};

/// 1 - beta^n for each tensor, where n counts this update.
at::Tensor bias_correction(const ForeachArgs& args, double beta) {
  return at::pow(beta, at::stack(args.steps).to(at::kDouble)).neg_().add_(1).to(args.parameters.front().scalar_type());
}

/// `trust_ratio` for each tensor, and 1 where one of the norms `a` and `b` is 0.
std::vector<at::Tensor> trust_ratios(const at::Tensor& a, const at::Tensor& b, const at::Tensor& trust_ratio) {
  return at::where(a.ne(0).logical_and(b.ne(0)), trust_ratio, at::ones_like(trust_ratio)).unbind();
}

}  // namespace

void update(const ForeachArgs& args, const SgdScalars& scalars) {
  const std::vector<at::Tensor> momentum = scalars.momentum == 0 ? std::vector<at::Tensor>() : args.states[0];
  with_step_counts(args, [&] {
    with_lr(args, scalars.lr, [&](const auto& lr) {
      at::_fused_sgd_(args.parameters, args.gradients, momentum, scalars.weight_decay, scalars.momentum, lr,
                      scalars.dampening, scalars.nesterov, /*maximize=*/false, scalars.first, {},
                      optional_found_inf(args));
    });
  });
}

void update(const ForeachArgs& args, const AdamScalars& scalars) {
  const std::vector<at::Tensor> max_second_moment = scalars.amsgrad ? args.states[2] : std::vector<at::Tensor>();
  const auto with = [&](const auto& fused) {
    with_lr(args, scalars.lr, [&](const auto& lr) {
      fused(args.parameters, args.gradients, args.states[0], args.states[1], max_second_moment, args.steps, lr,
            scalars.beta1, scalars.beta2, scalars.weight_decay, scalars.eps, scalars.amsgrad, /*maximize=*/false,
            std::optional<at::Tensor>(), optional_found_inf(args));
    });
  };
  with_step_counts(args, [&] {
    if (scalars.decoupled)
      with([](const auto&... all) { at::_fused_adamw_(all...); });
    else
      with([](const auto&... all) { at::_fused_adam_(all...); });
  });
}

void update(const ForeachArgs& args, const AdagradScalars& scalars) {
  with_step_counts(args, [&] {
    with_lr(args, scalars.lr, [&](const auto& lr) {
      at::_fused_adagrad_(args.parameters, args.gradients, args.states[0], args.steps, lr, scalars.lr_decay,
                          scalars.weight_decay, scalars.eps, /*maximize=*/false, {}, optional_found_inf(args));
    });
  });
}

void update(const ForeachArgs& args, const LambScalars& scalars) {
  const SkipRollback rollback(args);
  const auto& first = args.states[0];
  const auto& second = args.states[1];
  with_step_counts(args, [&] {
    at::_foreach_lerp_(first, args.gradients, 1 - scalars.beta1);
    at::_foreach_mul_(second, scalars.beta2);
    at::_foreach_addcmul_(second, args.gradients, args.gradients, 1 - scalars.beta2);
    std::vector<at::Tensor> below = at::_foreach_sqrt(second);
    if (scalars.correct_bias) at::_foreach_div_(below, bias_correction(args, scalars.beta2).sqrt_().unbind());
    at::_foreach_add_(below, scalars.eps);
    std::vector<at::Tensor> step = at::_foreach_div(first, below);
    if (scalars.correct_bias) at::_foreach_div_(step, bias_correction(args, scalars.beta1).unbind());
    if (scalars.weight_decay != 0) at::_foreach_add_(step, args.parameters, scalars.weight_decay);
    if (scalars.adapt) {
      const at::Tensor of_parameters = at::stack(at::_foreach_norm(args.parameters)),
                       of_steps = at::stack(at::_foreach_norm(step));
      at::_foreach_mul_(step, trust_ratios(of_parameters, of_steps, of_parameters / of_steps));
    }
    subtract(args, scalars.lr, step);
  });
  rollback.restore_if_skipped();
}

void update(const ForeachArgs& args, const LarsScalars& scalars) {
  const SkipRollback rollback(args);
  const auto& momentum = args.states[0];
  with_step_counts(args, [&] {
    std::vector<at::Tensor> step = at::_foreach_add(args.gradients, args.parameters, scalars.weight_decay);
    if (scalars.adapt) {
      const at::Tensor weights = at::stack(at::_foreach_norm(args.parameters)),
                       gradients = at::stack(at::_foreach_norm(args.gradients));
      at::_foreach_mul_(step, trust_ratios(weights, gradients,
                                           scalars.trust_coefficient * weights /
                                               (gradients + scalars.weight_decay * weights + scalars.eps)));
    }
    at::_foreach_mul_(momentum, scalars.momentum);  // before the first update, the buffers are zero
    at::_foreach_add_(momentum, step);
    if (scalars.nesterov)
      at::_foreach_add_(step, momentum, scalars.momentum);
    else
      step = momentum;
    subtract(args, scalars.lr, step);
  });
  rollback.restore_if_skipped();
}

}  // namespace lockstep::optim::kernels
