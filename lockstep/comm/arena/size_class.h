// The size classes of small blocks. Pure functions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace lockstep::comm::arena {

// The smallest block, and the alignment of all blocks: the size of a cache line, and libtorch's own alignment.
constexpr std::size_t kMinBlockBytes = 64;
// The largest small block. Larger blocks consist of whole pages.
constexpr std::size_t kMaxSmallBytes = 64 << 10;
// Up to this size every multiple of kMinBlockBytes is a class; beyond it there are four classes per doubling.
constexpr std::size_t kMaxLinearBytes = 1024;

/// The index of the class for blocks of `size` bytes, which is in 1..kMaxSmallBytes.
constexpr std::size_t size_class(std::size_t size) {
  if (size <= kMaxLinearBytes) return (size - 1) / kMinBlockBytes;
  const auto doubling =
      static_cast<std::size_t>(std::bit_width(size - 1)) - 1;  // 2^doubling < size <= 2^(doubling + 1)
  return kMaxLinearBytes / kMinBlockBytes + (doubling - 10) * 4 + (((size - 1) >> (doubling - 2)) & 3);
}

/// The number of bytes of a block of class `index`.
constexpr std::size_t class_bytes(std::size_t index) {
  if (index < kMaxLinearBytes / kMinBlockBytes) return (index + 1) * kMinBlockBytes;
  const std::size_t step = index - kMaxLinearBytes / kMinBlockBytes;
  return (std::size_t{1024} << (step / 4)) / 4 * (5 + step % 4);
}

constexpr std::size_t kNumSizeClasses = size_class(kMaxSmallBytes) + 1;

}  // namespace lockstep::comm::arena
