// How the elements of each dtype are read, added and stored: for loops that are compiled once for each instruction set.
// No include here, as in all that such loops include: what the standard library's headers define inline must not be
// compiled for vectors that a machine may lack. The includer has <bit>, <cstddef>, <cstdint> and defines LOCKSTEP_ISA,
// a namespace.
#pragma once

namespace lockstep::comm::LOCKSTEP_ISA {
namespace {

/// Elements that are added as they are.
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
    // To the nearest, ties to even; a NaN stays one.
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
}  // namespace lockstep::comm::LOCKSTEP_ISA
