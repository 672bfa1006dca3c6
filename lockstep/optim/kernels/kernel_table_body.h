// The kernels of kernels.h that work in place on one tensor, and the table of all kernels of one instruction set. The
// including file defines LOCKSTEP_ISA, the name of a namespace, and includes all other headers (see element_types.h).
#pragma once

#include "lockstep/optim/kernels/update_kernels_body.h"

namespace lockstep::optim::kernels::LOCKSTEP_ISA {
namespace {

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
