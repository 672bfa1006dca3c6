// Numbers as bits and bytes, as the encoders of payloads need them: elementwise, and equal on all CPUs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace lockstep::comm::codec {

constexpr float kLeastMagnitude = 1e-30F;  // below it, 1 / scale would be infinite; sent as zero

template <typename T>
T read(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}
template <typename T>
void write(std::uint8_t* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
}

/// The bits of |value|, in the order of magnitudes; those of a NaN are largest.
inline std::uint32_t magnitude_bits(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffff; }

template <std::int64_t kCount>
float largest_magnitude(const float* values) {
  std::int32_t largest = 0;  // signed, for which every x86-64 has a vector comparison
  for (std::int64_t i = 0; i < kCount; ++i)
    largest = std::max(largest, static_cast<std::int32_t>(magnitude_bits(values[i])));
  return std::bit_cast<float>(largest);
}

/// To the nearest integer, ties to even, for |value| < 2^22.
inline std::int32_t rounded(float value) {
  constexpr float kShift = 12582912;  // 1.5 * 2^23
  return std::bit_cast<std::int32_t>(value + kShift) - std::bit_cast<std::int32_t>(kShift);
}

}  // namespace lockstep::comm::codec
