// The loops of loops.h, compiled once for each instruction set: the includer gives LOCKSTEP_ISA, a namespace.
// No include of other headers here: see elements.h.
#pragma once

#include "lockstep/comm/interface/element_types.h"

namespace lockstep::optim::LOCKSTEP_ISA {
namespace {

using comm::LOCKSTEP_ISA::Bfloat16;
using comm::LOCKSTEP_ISA::Half;
using comm::LOCKSTEP_ISA::Plain;

constexpr std::size_t kTile = 1024;  // elements of a sum of more than two gradients, in cache

/// Gradients [begin, begin + n) of a run.
template <typename Element>
void read_gradients(const Run& run, std::size_t begin, std::size_t n, typename Element::Value* tile) {
  using Value = typename Element::Value;
  const auto of = [&](std::size_t i) { return static_cast<const typename Element::Stored*>(run.gradients[i]) + begin; };
  const auto divisor = static_cast<Value>(run.divisor);
  const auto scale = static_cast<Value>(run.scale);
  const auto* first = of(0);
  for (std::size_t k = 0; k < n; ++k) tile[k] = Element::load(first[k]);
  for (std::size_t i = 1; i < run.num_gradients; ++i) {
    const auto* next = of(i);
    for (std::size_t k = 0; k < n; ++k) tile[k] += Element::load(next[k]);
  }
  for (std::size_t k = 0; k < n; ++k) tile[k] = tile[k] / divisor * scale;
  if (run.max < __builtin_inf()) {
    const auto max = static_cast<Value>(run.max);
    for (std::size_t k = 0; k < n; ++k) {
      const Value value = tile[k] > max ? max : tile[k];
      tile[k] = value < -max ? -max : value;
    }
  }
}

/// Calls body(k, gradient) for each element. The gradient of a rank alone, or of two, is read in the same loop and not
/// divided (a half is exact); others, and those that are to be clamped, come by way of a tile.
template <typename Element, typename Body>
void for_each(const Run& run, Body body) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  if (run.num_gradients <= 2 && run.divisor == static_cast<double>(run.num_gradients) && !(run.max < __builtin_inf())) {
    const auto scale = static_cast<Value>(run.scale) / static_cast<Value>(run.divisor);
    const auto* first = static_cast<const Stored*>(run.gradients[0]);
    const auto* second = static_cast<const Stored*>(run.gradients[run.num_gradients - 1]);
    if (run.num_gradients == 1) {
#pragma GCC ivdep
      for (std::size_t k = 0; k < run.count; ++k) body(k, static_cast<Value>(Element::load(first[k]) * scale));
    } else {
#pragma GCC ivdep
      for (std::size_t k = 0; k < run.count; ++k)
        body(k, static_cast<Value>((Element::load(first[k]) + Element::load(second[k])) * scale));
    }
    return;
  }
  alignas(64) Value tile[kTile];
  for (std::size_t begin = 0; begin < run.count; begin += kTile) {
    const std::size_t n = run.count - begin < kTile ? run.count - begin : kTile;
    read_gradients<Element>(run, begin, n, tile);
#pragma GCC ivdep
    for (std::size_t k = 0; k < n; ++k) body(begin + k, tile[k]);
  }
}

template <typename Element, bool momentum, bool nesterov>
void sgd(const Run& run, const SgdRule& rule) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(run.parameter);
  auto* buffer = momentum ? static_cast<Value*>(run.states[0]) : nullptr;
  const auto lr = static_cast<Value>(rule.lr);
  const auto decay = static_cast<Value>(rule.weight_decay);
  const auto keep = static_cast<Value>(rule.first ? 0 : rule.momentum);
  const auto add = static_cast<Value>(rule.first ? 1 : 1 - rule.dampening);
  const auto ahead = static_cast<Value>(rule.momentum);
  for_each<Element>(run, [=](std::size_t k, Value gradient) {
    const Value p = Element::load(parameter[k]);
    Value d = gradient + decay * p;
    if constexpr (momentum) {
      const Value b = keep * buffer[k] + add * d;
      buffer[k] = b;
      d = nesterov ? d + ahead * b : b;
    }
    parameter[k] = Element::store(p - lr * d);
  });
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <typename Element, bool decoupled, bool amsgrad>
void adam(const Run& run, const AdamRule& rule) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(run.parameter);
  auto* first = static_cast<Value*>(run.states[0]);
  auto* second = static_cast<Value*>(run.states[1]);
  auto* greatest = amsgrad ? static_cast<Value*>(run.states[2]) : nullptr;
  const auto beta1 = static_cast<Value>(rule.beta1), rest1 = static_cast<Value>(1 - rule.beta1);
  const auto beta2 = static_cast<Value>(rule.beta2), rest2 = static_cast<Value>(1 - rule.beta2);
  const auto eps = static_cast<Value>(rule.eps);
  const auto keep = static_cast<Value>(decoupled ? 1 - rule.lr * rule.weight_decay : 1);
  const auto decay = static_cast<Value>(decoupled ? 0 : rule.weight_decay);
  const auto step_size = static_cast<Value>(rule.lr / rule.bias1);
  const auto unbias = static_cast<Value>(1 / __builtin_sqrt(rule.bias2));
  for_each<Element>(run, [=](std::size_t k, Value gradient) {
    Value p = Element::load(parameter[k]);
    if constexpr (decoupled)
      p = keep * p;
    else
      gradient = gradient + decay * p;
    const Value m = beta1 * first[k] + rest1 * gradient;
    const Value v = beta2 * second[k] + rest2 * gradient * gradient;
    first[k] = m;
    second[k] = v;
    Value top = v;
    if constexpr (amsgrad) greatest[k] = top = greatest[k] < v ? v : greatest[k];
    parameter[k] = Element::store(p - step_size * (m / (root(top) * unbias + eps)));
  });
}

template <typename Element>
void adagrad(const Run& run, const AdagradRule& rule) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(run.parameter);
  auto* squares = static_cast<Value*>(run.states[0]);
  const auto rate = static_cast<Value>(rule.rate), eps = static_cast<Value>(rule.eps),
             decay = static_cast<Value>(rule.weight_decay);
  for_each<Element>(run, [=](std::size_t k, Value gradient) {
    const Value p = Element::load(parameter[k]);
    const Value g = gradient + decay * p;
    const Value sum = squares[k] + g * g;
    squares[k] = sum;
    parameter[k] = Element::store(p - rate * (g / (root(sum) + eps)));
  });
}

/// A sum of squares as 32 sums side by side, so that its order is the same with vectors of any width, and no addition
/// waits for the one before.
struct SquareSum {
  static constexpr std::size_t kLanes = 32;
  double lanes[kLanes] = {};
  /// `tile` has room up to the next multiple of kLanes.
  template <typename Value>
  void add(Value* tile, std::size_t n) {
    for (std::size_t k = n; k % kLanes != 0; ++k) tile[k] = 0;
    for (std::size_t k = 0; k < n; k += kLanes)
      for (std::size_t lane = 0; lane < kLanes; ++lane)
        lanes[lane] += static_cast<double>(tile[k + lane]) * static_cast<double>(tile[k + lane]);
  }
  double total() const {
    double sum = 0;
    for (const double one : lanes) sum += one;
    return sum;
  }
};

template <typename Element>
double squares(const Run& run) {
  alignas(64) typename Element::Value tile[kTile];
  SquareSum sum;
  for (std::size_t begin = 0; begin < run.count; begin += kTile) {
    const std::size_t n = run.count - begin < kTile ? run.count - begin : kTile;
    read_gradients<Element>(run, begin, n, tile);
    sum.add(tile, n);
  }
  return sum.total();
}

template <typename Element>
void sgd_of(const Run& run, const SgdRule& rule) {
  if (rule.momentum == 0) return sgd<Element, false, false>(run, rule);
  return rule.nesterov ? sgd<Element, true, true>(run, rule) : sgd<Element, true, false>(run, rule);
}

template <typename Element>
void adam_of(const Run& run, const AdamRule& rule) {
  if (rule.decoupled)
    return rule.amsgrad ? adam<Element, true, true>(run, rule) : adam<Element, true, false>(run, rule);
  return rule.amsgrad ? adam<Element, false, true>(run, rule) : adam<Element, false, false>(run, rule);
}

}  // namespace

void update(const Run& run, const SgdRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return sgd_of<Plain<float>>(run, rule);
    case at::kDouble: return sgd_of<Plain<double>>(run, rule);
    case at::kBFloat16: return sgd_of<Bfloat16>(run, rule);
    case at::kHalf: return sgd_of<Half>(run, rule);
    default: return;  // FusedUpdate has refused it
  }
}

void update(const Run& run, const AdamRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return adam_of<Plain<float>>(run, rule);
    case at::kDouble: return adam_of<Plain<double>>(run, rule);
    case at::kBFloat16: return adam_of<Bfloat16>(run, rule);
    case at::kHalf: return adam_of<Half>(run, rule);
    default: return;
  }
}

void update(const Run& run, const AdagradRule& rule) {
  switch (run.dtype) {
    case at::kFloat: return adagrad<Plain<float>>(run, rule);
    case at::kDouble: return adagrad<Plain<double>>(run, rule);
    case at::kBFloat16: return adagrad<Bfloat16>(run, rule);
    case at::kHalf: return adagrad<Half>(run, rule);
    default: return;
  }
}

double sum_of_squares(const Run& run) {
  switch (run.dtype) {
    case at::kFloat: return squares<Plain<float>>(run);
    case at::kDouble: return squares<Plain<double>>(run);
    case at::kBFloat16: return squares<Bfloat16>(run);
    case at::kHalf: return squares<Half>(run);
    default: return 0;
  }
}

}  // namespace lockstep::optim::LOCKSTEP_ISA
