// One number for many, by which ranks compare what they are about to do.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace lockstep::optim {

/// Of the numbers' bits, in their order: a difference in one number alone is always seen.
inline std::uint64_t fingerprint(std::span<const double> numbers) {
  std::uint64_t hash = 14695981039346656037U;
  for (const double number : numbers) {  // each step can be undone, so that nothing is lost
    hash = (hash ^ std::bit_cast<std::uint64_t>(number)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return hash;
}
inline std::uint64_t fingerprint(std::initializer_list<double> numbers) {
  return fingerprint(std::span(numbers.begin(), numbers.size()));
}

}  // namespace lockstep::optim
