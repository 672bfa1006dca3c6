// A hash of numbers that ranks compare before they run the same operation.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace lockstep::optim::inline fused {

/// A 64-bit hash of the numbers' bits, in their order. Two lists that differ in exactly one number never have the same
/// hash.
inline std::uint64_t fingerprint(std::span<const double> numbers) {
  std::uint64_t hash = 14695981039346656037U;
  for (const double number : numbers) {  // each step is a bijection, so no difference is lost
    hash = (hash ^ std::bit_cast<std::uint64_t>(number)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return hash;
}
inline std::uint64_t fingerprint(std::initializer_list<double> numbers) {
  return fingerprint(std::span(numbers.begin(), numbers.size()));
}

}  // namespace lockstep::optim::inline fused
