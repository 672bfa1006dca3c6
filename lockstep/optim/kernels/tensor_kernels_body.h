// More loops of loops.h: over one tensor, in place. After loops_body.h, in the same way.
#pragma once

namespace lockstep::optim::LOCKSTEP_ISA {
namespace {

template <typename Element>
double squares_of(const void* data, std::size_t count) {
  const auto* values = static_cast<const typename Element::Stored*>(data);
  SquareSum sum;
  const std::size_t whole = count / SquareSum::kLanes * SquareSum::kLanes;
  double lanes[SquareSum::kLanes] = {};
  for (std::size_t k = 0; k < whole; k += SquareSum::kLanes)
    for (std::size_t lane = 0; lane < SquareSum::kLanes; ++lane) {
      const auto value = static_cast<double>(Element::load(values[k + lane]));
      lanes[lane] += value * value;
    }
  for (std::size_t k = whole; k < count; ++k) {
    const auto value = static_cast<double>(Element::load(values[k]));
    lanes[k - whole] += value * value;
  }
  for (std::size_t lane = 0; lane < SquareSum::kLanes; ++lane) sum.lanes[lane] = lanes[lane];
  return sum.total();
}

template <typename Element>
void scale_of(void* data, std::size_t count, double factor) {
  auto* values = static_cast<typename Element::Stored*>(data);
  const auto by = static_cast<typename Element::Value>(factor);
#pragma GCC ivdep
  for (std::size_t k = 0; k < count; ++k) values[k] = Element::store(Element::load(values[k]) * by);
}

template <typename Element>
void clamp_of(void* data, std::size_t count, double max) {
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

/// From `Stored` into averages of `Value`.
template <typename Element>
void blend_of(void* average, const void* data, std::size_t count, double keep) {
  using Value = typename Element::Value;
  auto* averages = static_cast<Value*>(average);
  const auto* values = static_cast<const typename Element::Stored*>(data);
  const auto old = static_cast<Value>(keep), rest = static_cast<Value>(1 - keep);
#pragma GCC ivdep
  for (std::size_t k = 0; k < count; ++k) averages[k] = old * averages[k] + rest * Element::load(values[k]);
}

}  // namespace

double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count) {
  switch (dtype) {
    case at::kFloat: return squares_of<Plain<float>>(data, count);
    case at::kDouble: return squares_of<Plain<double>>(data, count);
    case at::kBFloat16: return squares_of<Bfloat16>(data, count);
    case at::kHalf: return squares_of<Half>(data, count);
    default: return 0;
  }
}

void scale(at::ScalarType dtype, void* data, std::size_t count, double factor) {
  switch (dtype) {
    case at::kFloat: return scale_of<Plain<float>>(data, count, factor);
    case at::kDouble: return scale_of<Plain<double>>(data, count, factor);
    case at::kBFloat16: return scale_of<Bfloat16>(data, count, factor);
    case at::kHalf: return scale_of<Half>(data, count, factor);
    default: return;
  }
}

void clamp(at::ScalarType dtype, void* data, std::size_t count, double max) {
  switch (dtype) {
    case at::kFloat: return clamp_of<Plain<float>>(data, count, max);
    case at::kDouble: return clamp_of<Plain<double>>(data, count, max);
    case at::kBFloat16: return clamp_of<Bfloat16>(data, count, max);
    case at::kHalf: return clamp_of<Half>(data, count, max);
    default: return;
  }
}

void blend(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep) {
  switch (dtype) {
    case at::kFloat: return blend_of<Plain<float>>(average, data, count, keep);
    case at::kDouble: return blend_of<Plain<double>>(average, data, count, keep);
    case at::kBFloat16: return blend_of<Bfloat16>(average, data, count, keep);
    case at::kHalf: return blend_of<Half>(average, data, count, keep);
    default: return;
  }
}

}  // namespace lockstep::optim::LOCKSTEP_ISA
