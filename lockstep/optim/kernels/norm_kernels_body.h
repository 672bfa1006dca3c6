// More loops of loops.h: of optimizers that need norms before they update. After loops_body.h, in the same way.
#pragma once

namespace lockstep::optim::LOCKSTEP_ISA {
namespace {

/// body(k, gradient) for each element, whose results are what is measured beside the parameter.
template <typename Element, typename Body>
Squares measure_each(const Run& run, Body body) {
  using Value = typename Element::Value;
  const auto* parameter = static_cast<const typename Element::Stored*>(run.parameter);
  alignas(64) Value steps[kTile], values[kTile];
  SquareSum of_parameter, of_steps;
  for (std::size_t begin = 0; begin < run.count; begin += kTile) {
    const std::size_t n = run.count - begin < kTile ? run.count - begin : kTile;
    read_gradients<Element>(run, begin, n, steps);
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

/// What LAMB multiplies with the rate.
template <typename Element>
struct LambStep {
  using Value = typename Element::Value;
  explicit LambStep(const LambRule& rule)
      : first_scale(static_cast<Value>(1 / rule.bias1)),
        unbias(static_cast<Value>(1 / __builtin_sqrt(rule.bias2))),
        eps(static_cast<Value>(rule.eps)),
        decay(static_cast<Value>(rule.weight_decay)) {}
  Value operator()(Value first, Value second, Value parameter) const {
    return first_scale * first / (root(second) * unbias + eps) + decay * parameter;
  }
  Value first_scale, unbias, eps, decay;
};

template <typename Element>
Squares measure_lamb(const Run& run, const LambRule& rule) {
  using Value = typename Element::Value;
  auto* first = static_cast<Value*>(run.states[0]);
  auto* second = static_cast<Value*>(run.states[1]);
  const auto beta1 = static_cast<Value>(rule.beta1), rest1 = static_cast<Value>(1 - rule.beta1);
  const auto beta2 = static_cast<Value>(rule.beta2), rest2 = static_cast<Value>(1 - rule.beta2);
  const LambStep<Element> step(rule);
  return measure_each<Element>(run, [=](std::size_t k, Value gradient, Value p) {
    const Value m = beta1 * first[k] + rest1 * gradient;
    const Value v = beta2 * second[k] + rest2 * gradient * gradient;
    first[k] = m;
    second[k] = v;
    return step(m, v, p);
  });
}

template <typename Element>
void lamb(const Run& run, const LambRule& rule) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(run.parameter);
  const auto* first = static_cast<const Value*>(run.states[0]);
  const auto* second = static_cast<const Value*>(run.states[1]);
  const auto rate = static_cast<Value>(rule.lr * rule.ratio);
  const LambStep<Element> step(rule);
#pragma GCC ivdep
  for (std::size_t k = 0; k < run.count; ++k) {
    const Value p = Element::load(parameter[k]);
    parameter[k] = Element::store(p - rate * step(first[k], second[k], p));
  }
}

template <typename Element>
Squares measure_lars(const Run& run, const LarsRule&) {
  using Value = typename Element::Value;
  return measure_each<Element>(run, [](std::size_t, Value gradient, Value) { return gradient; });
}

template <typename Element, bool nesterov>
void lars(const Run& run, const LarsRule& rule) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(run.parameter);
  auto* buffer = static_cast<Value*>(run.states[0]);
  const auto lr = static_cast<Value>(rule.lr), decay = static_cast<Value>(rule.weight_decay),
             ratio = static_cast<Value>(rule.ratio);
  const auto keep = static_cast<Value>(rule.first ? 0 : rule.momentum);
  const auto ahead = static_cast<Value>(rule.momentum);
  for_each<Element>(run, [=](std::size_t k, Value gradient) {
    const Value p = Element::load(parameter[k]);
    const Value d = ratio * (gradient + decay * p);
    const Value b = keep * buffer[k] + d;
    buffer[k] = b;
    parameter[k] = Element::store(p - lr * (nesterov ? d + ahead * b : b));
  });
}

template <typename Element>
void lars_of(const Run& run, const LarsRule& rule) {
  return rule.nesterov ? lars<Element, true>(run, rule) : lars<Element, false>(run, rule);
}

}  // namespace

void update(const Run& run, const LambRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return lamb<Plain<float>>(run, rule);
    case at::kDouble: return lamb<Plain<double>>(run, rule);
    case at::kBFloat16: return lamb<Bfloat16>(run, rule);
    case at::kHalf: return lamb<Half>(run, rule);
    default: return;
  }
}

void update(const Run& run, const LarsRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return lars_of<Plain<float>>(run, rule);
    case at::kDouble: return lars_of<Plain<double>>(run, rule);
    case at::kBFloat16: return lars_of<Bfloat16>(run, rule);
    case at::kHalf: return lars_of<Half>(run, rule);
    default: return;
  }
}

Squares measure(const Run& run, const LambRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return measure_lamb<Plain<float>>(run, rule);
    case at::kDouble: return measure_lamb<Plain<double>>(run, rule);
    case at::kBFloat16: return measure_lamb<Bfloat16>(run, rule);
    case at::kHalf: return measure_lamb<Half>(run, rule);
    default: return {};
  }
}

Squares measure(const Run& run, const LarsRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return measure_lars<Plain<float>>(run, rule);
    case at::kDouble: return measure_lars<Plain<double>>(run, rule);
    case at::kBFloat16: return measure_lars<Bfloat16>(run, rule);
    case at::kHalf: return measure_lars<Half>(run, rule);
    default: return {};
  }
}

}  // namespace lockstep::optim::LOCKSTEP_ISA
