// The kernels of reduce() and convert(), compiled once per instruction set. The including file defines LOCKSTEP_ISA,
// the name of a namespace, and includes all other headers (see element_types.h).
#pragma once

#include "lockstep/base/simd/element_types.h"

namespace lockstep::comm::shm::LOCKSTEP_ISA {
namespace {

using base::simd::LOCKSTEP_ISA::Bfloat16;
using base::simd::LOCKSTEP_ISA::Half;
using base::simd::LOCKSTEP_ISA::NativeElement;

// The number of elements that are reduced in cache before they are stored to all outputs.
constexpr std::size_t kTileElements = 1024;

struct Sum {
  static auto apply(auto a, auto b) { return static_cast<decltype(a)>(a + b); }
};
struct Product {
  static auto apply(auto a, auto b) { return static_cast<decltype(a)>(a * b); }
};
struct Min {
  static auto apply(auto a, auto b) { return b < a ? b : a; }
};
struct Max {
  static auto apply(auto a, auto b) { return a < b ? b : a; }
};

template <typename Element, typename Op>
void reduce_tile(const Reduction& r, std::size_t begin, std::size_t n, typename Element::Value divisor) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  const auto input = [&](std::size_t i) { return static_cast<const Stored*>(r.inputs[i]) + begin; };
  alignas(64) Value sum[kTileElements];
  const Stored* first = input(0);
  if (r.num_inputs == 1) {
    for (std::size_t k = 0; k < n; ++k) sum[k] = Element::load(first[k]);
  } else {
    const Stored* second = input(1);
    for (std::size_t k = 0; k < n; ++k) sum[k] = Op::apply(Element::load(first[k]), Element::load(second[k]));
  }
  for (std::size_t i = 2; i < r.num_inputs; ++i) {
    const Stored* next = input(i);
    for (std::size_t k = 0; k < n; ++k) sum[k] = Op::apply(sum[k], Element::load(next[k]));
  }
  if (divisor != Value(1))
    for (std::size_t k = 0; k < n; ++k) sum[k] = static_cast<Value>(sum[k] / divisor);
  for (std::size_t i = 0; i < r.num_outputs; ++i) {
    Stored* output = static_cast<Stored*>(r.outputs[i]) + begin;
    for (std::size_t k = 0; k < n; ++k) output[k] = Element::store(sum[k]);
  }
}

/// Two inputs and two outputs: one pass without a tile. An output either is one of the inputs or does not overlap them.
template <typename Element, typename Op, bool divide>
void reduce_two(const Reduction& r, [[maybe_unused]] typename Element::Value divisor) {
  using Stored = typename Element::Stored;
  const auto* a = static_cast<const Stored*>(r.inputs[0]);
  const auto* b = static_cast<const Stored*>(r.inputs[1]);
  auto* x = static_cast<Stored*>(r.outputs[0]);
  auto* y = static_cast<Stored*>(r.outputs[1]);
#pragma GCC ivdep
  for (std::size_t k = 0; k < r.count; ++k) {
    auto result = Op::apply(Element::load(a[k]), Element::load(b[k]));
    if constexpr (divide) result = static_cast<typename Element::Value>(result / divisor);
    x[k] = y[k] = Element::store(result);
  }
}

template <typename Element, typename Op>
void reduce_as(const Reduction& r) {
  const auto divisor = static_cast<typename Element::Value>(r.divisor);
  if (r.num_inputs == 2 && r.num_outputs == 2)
    return r.divisor == 1 ? reduce_two<Element, Op, false>(r, divisor) : reduce_two<Element, Op, true>(r, divisor);
  for (std::size_t begin = 0; begin < r.count; begin += kTileElements)
    reduce_tile<Element, Op>(r, begin, r.count - begin < kTileElements ? r.count - begin : kTileElements, divisor);
}

template <typename Element>
void reduce_elements(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return reduce_as<Element, Sum>(r);
    case ReduceOp::kMin: return reduce_as<Element, Min>(r);
    case ReduceOp::kMax: return reduce_as<Element, Max>(r);
    case ReduceOp::kProduct: return reduce_as<Element, Product>(r);
  }
}

void reduce_bools(const Reduction& r) {
  const bool any = r.op == ReduceOp::kSum || r.op == ReduceOp::kMax;
  return any ? reduce_as<NativeElement<std::uint8_t>, Max>(r) : reduce_as<NativeElement<std::uint8_t>, Min>(r);
}

template <typename From, typename To>
void convert_as(const Conversion& c) {
  const auto* from = static_cast<const typename From::Stored*>(c.input);
  auto* to = static_cast<typename To::Stored*>(c.output);
#pragma GCC ivdep
  for (std::size_t k = 0; k < c.count; ++k) to[k] = To::store(From::load(from[k]));
}

void convert(const Conversion& c) {
  if (c.from == at::kFloat && c.to == at::kBFloat16) return convert_as<NativeElement<float>, Bfloat16>(c);
  if (c.from == at::kBFloat16 && c.to == at::kFloat) return convert_as<Bfloat16, NativeElement<float>>(c);
  if (c.from == at::kFloat && c.to == at::kHalf) return convert_as<NativeElement<float>, Half>(c);
  if (c.from == at::kHalf && c.to == at::kFloat) return convert_as<Half, NativeElement<float>>(c);
  fail_reduce_dtype(c.from == at::kFloat ? c.to : c.from);
}

void reduce(const Reduction& r) {
  switch (r.dtype) {
    case at::kFloat: return reduce_elements<NativeElement<float>>(r);
    case at::kDouble: return reduce_elements<NativeElement<double>>(r);
    case at::kBFloat16: return reduce_elements<Bfloat16>(r);
    case at::kHalf: return reduce_elements<Half>(r);
    case at::kLong: return reduce_elements<NativeElement<std::int64_t>>(r);
    case at::kInt: return reduce_elements<NativeElement<std::int32_t>>(r);
    case at::kChar: return reduce_elements<NativeElement<std::int8_t>>(r);
    case at::kByte: return reduce_elements<NativeElement<std::uint8_t>>(r);
    case at::kBool: return reduce_bools(r);
    default: fail_reduce_dtype(r.dtype);
  }
}

}  // namespace

constinit const ReduceTable kTable{.reduce = reduce, .convert = convert};

}  // namespace lockstep::comm::shm::LOCKSTEP_ISA
