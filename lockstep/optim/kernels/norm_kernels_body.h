// The kernels of kernels.h for optimizers that need norms before the update (LAMB, LARS). Included by
// kernel_table_body.h.
#pragma once

#include "lockstep/optim/kernels/update_kernels_body.h"

namespace lockstep::optim::kernels::LOCKSTEP_ISA {
namespace {

/// Returns the sums of squares of the parameter and of the values that body(k, gradient, parameter) returns.
template <typename Element, typename Body>
SquaredNorms measure_norms_each(const KernelArgs& args, Body body) {
  using Value = typename Element::Value;
  const auto* parameter = static_cast<const typename Element::Stored*>(args.parameter);
  alignas(64) Value steps[kTile], values[kTile];
  SquareSum of_parameter, of_steps;
  for (std::size_t begin = 0; begin < args.count; begin += kTile) {
    const std::size_t n = args.count - begin < kTile ? args.count - begin : kTile;
    read_gradients<Element>(args, begin, n, steps);
#pragma GCC ivdep
    for (std::size_t k = 0; k < n; ++k) {
      values[k] = Element::load(parameter[begin + k]);
      steps[k] = body(begin + k, steps[k], values[k]);
    }
    of_parameter.add(values, n);
    of_steps.add(steps, n);
  }
  return {of_parameter.total(), of_steps.total()};
}

/// LAMB's step before it is multiplied by the learning rate.
template <typename Element>
struct LambStep {
  using Value = typename Element::Value;
  explicit LambStep(const LambScalars& scalars)
      : first_scale(static_cast<Value>(1 / scalars.bias_correction1)),
        unbias(static_cast<Value>(1 / __builtin_sqrt(scalars.bias_correction2))),
        eps(static_cast<Value>(scalars.eps)),
        decay(static_cast<Value>(scalars.weight_decay)) {}
  Value operator()(Value first, Value second, Value parameter) const {
    return first_scale * first / (square_root(second) * unbias + eps) + decay * parameter;
  }
  Value first_scale, unbias, eps, decay;
};

template <typename Element>
SquaredNorms lamb_norms(const KernelArgs& args, const LambScalars& scalars) {
  using Value = typename Element::Value;
  auto* first = static_cast<Value*>(args.states[0]);
  auto* second = static_cast<Value*>(args.states[1]);
  const auto beta1 = static_cast<Value>(scalars.beta1), rest1 = static_cast<Value>(1 - scalars.beta1);
  const auto beta2 = static_cast<Value>(scalars.beta2), rest2 = static_cast<Value>(1 - scalars.beta2);
  const LambStep<Element> step(scalars);
  return measure_norms_each<Element>(args, [=](std::size_t k, Value gradient, Value p) {
    const Value m = beta1 * first[k] + rest1 * gradient;
    const Value v = beta2 * second[k] + rest2 * gradient * gradient;
    first[k] = m;
    second[k] = v;
    return step(m, v, p);
  });
}

template <typename Element>
void lamb(const KernelArgs& args, const LambScalars& scalars) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(args.parameter);
  const auto* first = static_cast<const Value*>(args.states[0]);
  const auto* second = static_cast<const Value*>(args.states[1]);
  const auto rate = static_cast<Value>(scalars.lr * scalars.trust_ratio);
  const LambStep<Element> step(scalars);
#pragma GCC ivdep
  for (std::size_t k = 0; k < args.count; ++k) {
    const Value p = Element::load(parameter[k]);
    parameter[k] = Element::store(p - rate * step(first[k], second[k], p));
  }
}

template <typename Element, bool nesterov>
void lars(const KernelArgs& args, const LarsScalars& scalars) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(args.parameter);
  auto* buffer = static_cast<Value*>(args.states[0]);
  const auto lr = static_cast<Value>(scalars.lr), decay = static_cast<Value>(scalars.weight_decay),
             trust_ratio = static_cast<Value>(scalars.trust_ratio);
  const auto keep = static_cast<Value>(scalars.first ? 0 : scalars.momentum);
  const auto ahead = static_cast<Value>(scalars.momentum);
  for_each<Element>(args, [=](std::size_t k, Value gradient) {
    const Value p = Element::load(parameter[k]);
    const Value d = trust_ratio * (gradient + decay * p);
    const Value b = keep * buffer[k] + d;
    buffer[k] = b;
    parameter[k] = Element::store(p - lr * (nesterov ? d + ahead * b : b));
  });
}

void update_lamb(const KernelArgs& args, const LambScalars& scalars) {
  with_element(args.dtype, [&]<typename Element>(Element) { lamb<Element>(args, scalars); });
}

void update_lars(const KernelArgs& args, const LarsScalars& scalars) {
  with_element(args.dtype, [&]<typename Element>(Element) {
    scalars.nesterov ? lars<Element, true>(args, scalars) : lars<Element, false>(args, scalars);
  });
}

SquaredNorms measure_lamb(const KernelArgs& args, const LambScalars& scalars) {
  return with_element(args.dtype, [&]<typename Element>(Element) { return lamb_norms<Element>(args, scalars); });
}

SquaredNorms measure_lars(const KernelArgs& args, const LarsScalars&) {
  return with_element(args.dtype, [&]<typename Element>(Element) {
    using Value = typename Element::Value;
    return measure_norms_each<Element>(args, [](std::size_t, Value gradient, Value) { return gradient; });
  });
}

}  // namespace
}  // namespace lockstep::optim::kernels::LOCKSTEP_ISA
