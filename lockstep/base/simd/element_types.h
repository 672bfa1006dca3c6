// Loads and stores of the elements of each dtype, for loops that are compiled once per instruction set.
//
// This header and all headers of such loops include nothing: inline functions of the standard library must not be
// compiled for vector instructions that a machine may lack. The including file includes <bit>, <cstddef> and <cstdint>
// and defines LOCKSTEP_ISA, the name of a namespace.
#pragma once

namespace lockstep::base::simd::LOCKSTEP_ISA {
namespace {

/// Elements that are reduced in their own type.
template <typename T>
struct NativeElement {
  using Stored = T;
  using Value = T;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static Value load(Stored x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }
  static Stored store(Value x) {
    // Round to nearest, ties to even; a NaN stays a NaN.
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<Stored>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
  }
};

struct Half {
  using Stored = _Float16;
  using Value = float;
  static Value load(Stored x) { return static_cast<float>(x); }
  static Stored store(Value x) { return static_cast<Stored>(x); }
};

}  // namespace
}  // namespace lockstep::base::simd::LOCKSTEP_ISA
