// float32 numbers as int8, in blocks of 256 that share a float32 scale: 1.016 bytes for each. Decoding is elementwise
// and never contracts a multiplication and an addition, so that hosts with different CPUs hold the same bits.
#pragma once

#include <cstdint>

namespace lockstep::comm::codec {

inline constexpr std::int64_t kInt8Block = 256;
inline constexpr std::int64_t kInt8BlockBytes = 4 + kInt8Block;

/// The bytes of `count` numbers, a multiple of kInt8Block.
constexpr std::int64_t int8_bytes(std::int64_t count) { return count / kInt8Block * kInt8BlockBytes; }

/// Encodes `count` numbers, a multiple of kInt8Block, and leaves in `values` what each has lost: the value less the
/// decoded one. A block with an infinity or a NaN decodes to NaNs, and loses nothing.
void encode_int8(float* values, std::int64_t count, std::uint8_t* bytes);

/// Adds `weight` times the decoded numbers to `sums`.
void add_int8(const std::uint8_t* bytes, std::int64_t count, float weight, float* sums);

}  // namespace lockstep::comm::codec
