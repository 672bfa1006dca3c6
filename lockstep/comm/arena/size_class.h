// Into which size a small block is rounded. Pure.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace lockstep::comm {

constexpr std::size_t kSmallest = 64;            // also the alignment of all blocks: a cache line, and libtorch's own
constexpr std::size_t kLargestSmall = 64 << 10;  // beyond it blocks are whole pages
constexpr std::size_t kLinear = 1024;  // up to here every multiple of kSmallest has a class, then four a doubling

/// Number of the class for `size`, 1 to kLargestSmall bytes.
constexpr std::size_t size_class(std::size_t size) {
  if (size <= kLinear) return (size - 1) / kSmallest;
  const auto doubling =
      static_cast<std::size_t>(std::bit_width(size - 1)) - 1;  // 2^doubling < size <= 2^(doubling + 1)
  return kLinear / kSmallest + (doubling - 10) * 4 + (((size - 1) >> (doubling - 2)) & 3);
}

/// Bytes of a block of class `index`.
constexpr std::size_t class_bytes(std::size_t index) {
  if (index < kLinear / kSmallest) return (index + 1) * kSmallest;
  const std::size_t step = index - kLinear / kSmallest;
  return (std::size_t{1024} << (step / 4)) / 4 * (5 + step % 4);
}

constexpr std::size_t kNumClasses = size_class(kLargestSmall) + 1;

}  // namespace lockstep::comm
