#include "lockstep/comm/codec/int8.h"

#include <cmath>
#include <limits>

#include "lockstep/comm/codec/coding.h"

namespace lockstep::comm::codec {
namespace {

void encode_block(float* values, std::uint8_t* bytes) {
  const float largest = largest_magnitude<kInt8Block>(values);
  const bool is_finite = std::isfinite(largest);
  const bool is_zero = largest < kLeastMagnitude;
  const float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0 : largest / 127;
  const float inverse = is_finite && !is_zero ? 127 / largest : 0;
  write(bytes, scale);
  if (!is_finite) {
    std::memset(bytes + 4, 0, kInt8Block);
    std::fill_n(values, kInt8Block, 0.0F);
    return;
  }
  for (std::int64_t i = 0; i < kInt8Block; ++i) {
    const std::int32_t code = rounded(values[i] * inverse);
    bytes[4 + i] = static_cast<std::uint8_t>(code);
    values[i] -= scale * static_cast<float>(code);
  }
}

}  // namespace

void encode_int8(float* values, std::int64_t count, std::uint8_t* bytes) {
  for (std::int64_t i = 0; i < count; i += kInt8Block, bytes += kInt8BlockBytes) encode_block(values + i, bytes);
}

void add_int8(const std::uint8_t* bytes, std::int64_t count, float weight, float* sums) {
  for (std::int64_t block = 0; block < count; block += kInt8Block, bytes += kInt8BlockBytes) {
    const auto scale = read<float>(bytes);
    for (std::int64_t i = 0; i < kInt8Block; ++i)
      sums[block + i] += weight * (scale * static_cast<float>(static_cast<std::int8_t>(bytes[4 + i])));
  }
}

}  // namespace lockstep::comm::codec
