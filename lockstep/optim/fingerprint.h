// One number for many, by which ranks compare what they are about to do.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace lockstep::optim {

/// 64-bit FNV-1a of the numbers' bits.
inline std::uint64_t fingerprint(std::span<const double> numbers) {
  std::uint64_t hash = 14695981039346656037U;
  for (const double number : numbers)
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ (std::bit_cast<std::uint64_t>(number) >> shift & 255)) * 1099511628211U;
  return hash;
}
inline std::uint64_t fingerprint(std::initializer_list<double> numbers) { return fingerprint(std::span(numbers.begin(), numbers.size())); }

}  // namespace lockstep::optim
