// The kernels of kernels.h and their table, compiled once per instruction set. The including file defines LOCKSTEP_ISA,
// the name of a namespace, and includes all other headers (see element_types.h).
#pragma once

#include "lockstep/base/simd/element_types.h"

namespace lockstep::optim::kernels::LOCKSTEP_ISA {
namespace {

using base::simd::LOCKSTEP_ISA::Bfloat16;
using base::simd::LOCKSTEP_ISA::Half;
using base::simd::LOCKSTEP_ISA::NativeElement;

/// Returns act(element), where the type of `element` has the loads and stores of `dtype`.
template <typename Act>
auto with_element(at::ScalarType dtype, const Act& act) {
  switch (dtype) {
    case at::kFloat: return act(NativeElement<float>());
    case at::kDouble: return act(NativeElement<double>());
    case at::kBFloat16: return act(Bfloat16());
    case at::kHalf: return act(Half());
    default: fail_kernel_dtype(dtype);
  }
}

constexpr std::size_t kTile = 1024;  // elements per block when more than two gradients are added; fits in cache

/// Writes the reduced gradient of elements [begin, begin + n) to `tile`.
template <typename Element>
void read_gradients(const KernelArgs& args, std::size_t begin, std::size_t n, typename Element::Value* tile) {
  using Value = typename Element::Value;
  const auto of = [&](std::size_t i) {
    return static_cast<const typename Element::Stored*>(args.gradients[i]) + begin;
  };
  const auto divisor = static_cast<Value>(args.divisor);
  const auto scale = static_cast<Value>(args.scale);
  const auto* first = of(0);
  for (std::size_t k = 0; k < n; ++k) tile[k] = Element::load(first[k]);
  for (std::size_t i = 1; i < args.num_gradients; ++i) {
    const auto* next = of(i);
    for (std::size_t k = 0; k < n; ++k) tile[k] += Element::load(next[k]);
  }
  for (std::size_t k = 0; k < n; ++k) tile[k] = tile[k] / divisor * scale;
  if (args.max < __builtin_inf()) {
    const auto max = static_cast<Value>(args.max);
    for (std::size_t k = 0; k < n; ++k) {
      const Value value = tile[k] > max ? max : tile[k];
      tile[k] = value < -max ? -max : value;
    }
  }
}

/// Calls body(k, gradient) for each element. Gradients of one or two ranks are read in the same loop, with the division
/// folded into the scale (a factor of 1/2 is exact); others, and gradients that must be clamped, are first reduced into
/// a tile.
template <typename Element, typename Body>
void for_each(const KernelArgs& args, Body body) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  if (args.num_gradients <= 2 && args.divisor == static_cast<double>(args.num_gradients) &&
      !(args.max < __builtin_inf())) {
    const auto scale = static_cast<Value>(args.scale) / static_cast<Value>(args.divisor);
    const auto* first = static_cast<const Stored*>(args.gradients[0]);
    const auto* second = static_cast<const Stored*>(args.gradients[args.num_gradients - 1]);
    if (args.num_gradients == 1) {
#pragma GCC ivdep
      for (std::size_t k = 0; k < args.count; ++k) body(k, static_cast<Value>(Element::load(first[k]) * scale));
    } else {
#pragma GCC ivdep
      for (std::size_t k = 0; k < args.count; ++k)
        body(k, static_cast<Value>((Element::load(first[k]) + Element::load(second[k])) * scale));
    }
    return;
  }
  alignas(64) Value tile[kTile];
  for (std::size_t begin = 0; begin < args.count; begin += kTile) {
    const std::size_t n = args.count - begin < kTile ? args.count - begin : kTile;
    read_gradients<Element>(args, begin, n, tile);
#pragma GCC ivdep
    for (std::size_t k = 0; k < n; ++k) body(begin + k, tile[k]);
  }
}

template <typename Element, bool momentum, bool nesterov>
void sgd(const KernelArgs& args, const SgdScalars& scalars) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(args.parameter);
  auto* buffer = momentum ? static_cast<Value*>(args.states[0]) : nullptr;
  const auto lr = static_cast<Value>(scalars.lr);
  const auto decay = static_cast<Value>(scalars.weight_decay);
  const auto keep = static_cast<Value>(scalars.first ? 0 : scalars.momentum);
  const auto add = static_cast<Value>(scalars.first ? 1 : 1 - scalars.dampening);
  const auto ahead = static_cast<Value>(scalars.momentum);
  for_each<Element>(args, [=](std::size_t k, Value gradient) {
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

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

template <typename Element, bool decoupled, bool amsgrad>
void adam(const KernelArgs& args, const AdamScalars& scalars) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(args.parameter);
  auto* first = static_cast<Value*>(args.states[0]);
  auto* second = static_cast<Value*>(args.states[1]);
  auto* max_second_moment = amsgrad ? static_cast<Value*>(args.states[2]) : nullptr;
  const auto beta1 = static_cast<Value>(scalars.beta1), rest1 = static_cast<Value>(1 - scalars.beta1);
  const auto beta2 = static_cast<Value>(scalars.beta2), rest2 = static_cast<Value>(1 - scalars.beta2);
  const auto eps = static_cast<Value>(scalars.eps);
  const auto keep = static_cast<Value>(decoupled ? 1 - scalars.lr * scalars.weight_decay : 1);
  const auto decay = static_cast<Value>(decoupled ? 0 : scalars.weight_decay);
  const auto step_size = static_cast<Value>(scalars.lr / scalars.bias_correction1);
  const auto unbias = static_cast<Value>(1 / __builtin_sqrt(scalars.bias_correction2));
  for_each<Element>(args, [=](std::size_t k, Value gradient) {
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
    if constexpr (amsgrad) max_second_moment[k] = top = max_second_moment[k] < v ? v : max_second_moment[k];
    parameter[k] = Element::store(p - step_size * (m / (square_root(top) * unbias + eps)));
  });
}

template <typename Element>
void adagrad(const KernelArgs& args, const AdagradScalars& scalars) {
  using Value = typename Element::Value;
  auto* parameter = static_cast<typename Element::Stored*>(args.parameter);
  auto* squares = static_cast<Value*>(args.states[0]);
  const auto current_lr = static_cast<Value>(scalars.current_lr), eps = static_cast<Value>(scalars.eps),
             decay = static_cast<Value>(scalars.weight_decay);
  for_each<Element>(args, [=](std::size_t k, Value gradient) {
    const Value p = Element::load(parameter[k]);
    const Value g = gradient + decay * p;
    const Value sum = squares[k] + g * g;
    squares[k] = sum;
    parameter[k] = Element::store(p - current_lr * (g / (square_root(sum) + eps)));
  });
}

/// A sum of squares in 32 accumulators: the order of additions is the same for every vector width, and consecutive
/// additions do not depend on each other.
struct SquareSum {
  static constexpr std::size_t kAccumulators = 32;
  double accumulators[kAccumulators] = {};
  /// Adds the squares of `n` elements. `tile` must have space up to the next multiple of kAccumulators.
  template <typename Value>
  void add(Value* tile, std::size_t n) {
    for (std::size_t k = n; k % kAccumulators != 0; ++k) tile[k] = 0;
    for (std::size_t k = 0; k < n; k += kAccumulators)
      for (std::size_t j = 0; j < kAccumulators; ++j)
        accumulators[j] += static_cast<double>(tile[k + j]) * static_cast<double>(tile[k + j]);
  }
  double total() const {
    double sum = 0;
    for (const double accumulator : accumulators) sum += accumulator;
    return sum;
  }
};

template <typename Element>
double squares(const KernelArgs& args) {
  alignas(64) typename Element::Value tile[kTile];
  SquareSum sum;
  for (std::size_t begin = 0; begin < args.count; begin += kTile) {
    const std::size_t n = args.count - begin < kTile ? args.count - begin : kTile;
    read_gradients<Element>(args, begin, n, tile);
    sum.add(tile, n);
  }
  return sum.total();
}

void update_sgd(const KernelArgs& args, const SgdScalars& scalars) {
  with_element(args.dtype, [&]<typename Element>(Element) {
    if (scalars.momentum == 0) return sgd<Element, false, false>(args, scalars);
    return scalars.nesterov ? sgd<Element, true, true>(args, scalars) : sgd<Element, true, false>(args, scalars);
  });
}

void update_adam(const KernelArgs& args, const AdamScalars& scalars) {
  with_element(args.dtype, [&]<typename Element>(Element) {
    if (scalars.decoupled)
      return scalars.amsgrad ? adam<Element, true, true>(args, scalars) : adam<Element, true, false>(args, scalars);
    return scalars.amsgrad ? adam<Element, false, true>(args, scalars) : adam<Element, false, false>(args, scalars);
  });
}

void update_adagrad(const KernelArgs& args, const AdagradScalars& scalars) {
  with_element(args.dtype, [&]<typename Element>(Element) { adagrad<Element>(args, scalars); });
}

double sum_of_squares(const KernelArgs& args) {
  return with_element(args.dtype, [&]<typename Element>(Element) { return squares<Element>(args); });
}

// For optimizers that need norms before the update: LAMB, LARS.

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

// In place, on one tensor.

template <typename Element>
double sum_of_squares_typed(const void* data, std::size_t count) {
  const auto* values = static_cast<const typename Element::Stored*>(data);
  SquareSum sum;
  const std::size_t whole = count / SquareSum::kAccumulators * SquareSum::kAccumulators;
  double accumulators[SquareSum::kAccumulators] = {};
  for (std::size_t k = 0; k < whole; k += SquareSum::kAccumulators)
    for (std::size_t j = 0; j < SquareSum::kAccumulators; ++j) {
      const auto value = static_cast<double>(Element::load(values[k + j]));
      accumulators[j] += value * value;
    }
  for (std::size_t k = whole; k < count; ++k) {
    const auto value = static_cast<double>(Element::load(values[k]));
    accumulators[k - whole] += value * value;
  }
  for (std::size_t j = 0; j < SquareSum::kAccumulators; ++j) sum.accumulators[j] = accumulators[j];
  return sum.total();
}

template <typename Element>
void scale_typed(void* data, std::size_t count, double factor) {
  auto* values = static_cast<typename Element::Stored*>(data);
  const auto by = static_cast<typename Element::Value>(factor);
#pragma GCC ivdep
  for (std::size_t k = 0; k < count; ++k) values[k] = Element::store(Element::load(values[k]) * by);
}

template <typename Element>
void clamp_typed(void* data, std::size_t count, double max) {
  using Value = typename Element::Value;
  auto* values = static_cast<typename Element::Stored*>(data);
  const auto top = static_cast<Value>(max);
#pragma GCC ivdep
  for (std::size_t k = 0; k < count; ++k) {
    Value value = Element::load(values[k]);
    value = value > top ? top : value;
    values[k] = Element::store(value < -top ? -top : value);
  }
}

/// Reads elements of type `Stored` and updates averages of type `Value`.
template <typename Element>
void update_ema_typed(void* average, const void* data, std::size_t count, double decay) {
  using Value = typename Element::Value;
  auto* averages = static_cast<Value*>(average);
  const auto* values = static_cast<const typename Element::Stored*>(data);
  const auto old = static_cast<Value>(decay), rest = static_cast<Value>(1 - decay);
#pragma GCC ivdep
  for (std::size_t k = 0; k < count; ++k) averages[k] = old * averages[k] + rest * Element::load(values[k]);
}

double tensor_sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count) {
  return with_element(dtype, [&]<typename Element>(Element) { return sum_of_squares_typed<Element>(data, count); });
}

void scale(at::ScalarType dtype, void* data, std::size_t count, double factor) {
  with_element(dtype, [&]<typename Element>(Element) { scale_typed<Element>(data, count, factor); });
}

void clamp(at::ScalarType dtype, void* data, std::size_t count, double max) {
  with_element(dtype, [&]<typename Element>(Element) { clamp_typed<Element>(data, count, max); });
}

void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay) {
  with_element(dtype, [&]<typename Element>(Element) { update_ema_typed<Element>(average, data, count, decay); });
}

}  // namespace

constinit const KernelTable kTable{.sgd = update_sgd,
                                   .adam = update_adam,
                                   .adagrad = update_adagrad,
                                   .lamb = update_lamb,
                                   .lars = update_lars,
                                   .measure_lamb = measure_lamb,
                                   .measure_lars = measure_lars,
                                   .sum_of_squares = sum_of_squares,
                                   .tensor_sum_of_squares = tensor_sum_of_squares,
                                   .scale = scale,
                                   .clamp = clamp,
                                   .update_ema = update_ema};

}  // namespace lockstep::optim::kernels::LOCKSTEP_ISA
