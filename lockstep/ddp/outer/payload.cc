#include "lockstep/ddp/outer/payload.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/comm/codec/coding.h"
#include "lockstep/comm/codec/int8.h"

namespace lockstep::ddp::inline outer {
namespace {

using comm::codec::kLeastMagnitude;
using comm::codec::largest_magnitude;
using comm::codec::magnitude_bits;
using comm::codec::read;
using comm::codec::rounded;
using comm::codec::write;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint32_t kInfinityBits = 0x7f800000;
constexpr std::int64_t kInt4Block = 64;             // that shares a scale
constexpr std::int64_t kParallelNumbers = 1 << 16;  // for one thread, at least

std::uint16_t to_bfloat16(float value) {  // to nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffff) > kInfinityBits) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// One coder for each Payload: encodes and decodes a block.

struct Float32Coder {
  static constexpr std::int64_t kBytes = kPayloadBlock * 4;
  static void encode(float* values, std::uint8_t* bytes) {
    std::memcpy(bytes, values, kBytes);
    std::fill_n(values, kPayloadBlock, 0.0F);
  }
  static void add(const std::uint8_t* bytes, float weight, float* sums) {
    for (std::int64_t i = 0; i < kPayloadBlock; ++i) sums[i] += weight * read<float>(bytes + 4 * i);
  }
};

struct Bfloat16Coder {
  static constexpr std::int64_t kBytes = kPayloadBlock * 2;
  static void encode(float* values, std::uint8_t* bytes) {
    const bool is_finite = std::isfinite(largest_magnitude<kPayloadBlock>(values));
    for (std::int64_t i = 0; i < kPayloadBlock; ++i) {
      const std::uint16_t code = to_bfloat16(values[i]);
      write(bytes + 2 * i, code);
      values[i] = is_finite ? values[i] - from_bfloat16(code) : 0;
    }
  }
  static void add(const std::uint8_t* bytes, float weight, float* sums) {
    for (std::int64_t i = 0; i < kPayloadBlock; ++i)
      sums[i] += weight * from_bfloat16(read<std::uint16_t>(bytes + 2 * i));
  }
};

struct Int8Coder {
  static_assert(kPayloadBlock == comm::codec::kInt8Block);
  static constexpr std::int64_t kBytes = comm::codec::kInt8BlockBytes;
  static void encode(float* values, std::uint8_t* bytes) { comm::codec::encode_int8(values, kPayloadBlock, bytes); }
  static void add(const std::uint8_t* bytes, float weight, float* sums) {
    comm::codec::add_int8(bytes, kPayloadBlock, weight, sums);
  }
};

/// Numbers i and i + 32 of 64 share a byte.
struct Int4Coder {
  static constexpr std::int64_t kHalf = kInt4Block / 2, kPart = 2 + kHalf;
  static constexpr std::int64_t kBytes = kPayloadBlock / kInt4Block * kPart;
  static void encode(float* values, std::uint8_t* bytes) {
    for (std::int64_t part = 0; part < kPayloadBlock / kInt4Block; ++part)
      encode_part(values + part * kInt4Block, bytes + part * kPart);
  }
  static void encode_part(float* values, std::uint8_t* bytes) {
    const float largest = largest_magnitude<kInt4Block>(values);
    const bool is_finite = std::isfinite(largest);
    const std::uint16_t code_of_scale = to_bfloat16(!is_finite ? kNan : largest < kLeastMagnitude ? 0 : largest / 7);
    const float scale = from_bfloat16(code_of_scale);
    const float inverse = is_finite && scale > 0 ? 1 / scale : 0;
    write(bytes, code_of_scale);
    if (!is_finite) {
      std::memset(bytes + 2, 0x88, kHalf);
      std::fill_n(values, kInt4Block, 0.0F);
      return;
    }
    for (std::int64_t i = 0; i < kHalf; ++i) {
      const std::int32_t low = std::clamp(rounded(values[i] * inverse), -7, 7);
      const std::int32_t high = std::clamp(rounded(values[i + kHalf] * inverse), -7, 7);
      bytes[2 + i] = static_cast<std::uint8_t>((low + 8) | (high + 8) << 4);
      values[i] -= scale * static_cast<float>(low);
      values[i + kHalf] -= scale * static_cast<float>(high);
    }
  }
  static void add(const std::uint8_t* bytes, float weight, float* sums) {
    for (std::int64_t part = 0; part < kPayloadBlock / kInt4Block; ++part, bytes += kPart, sums += kInt4Block) {
      const float scale = from_bfloat16(read<std::uint16_t>(bytes));
      for (std::int64_t i = 0; i < kHalf; ++i) {
        sums[i] += weight * (scale * static_cast<float>((bytes[2 + i] & 15) - 8));
        sums[i + kHalf] += weight * (scale * static_cast<float>((bytes[2 + i] >> 4) - 8));
      }
    }
  }
};

/// Calls use(coder).
template <typename Use>
auto with_coder(Payload payload, Use&& use) {
  switch (payload) {
    case Payload::kFloat32: return use(Float32Coder{});
    case Payload::kBFloat16: return use(Bfloat16Coder{});
    case Payload::kInt8: return use(Int8Coder{});
    case Payload::kInt4: return use(Int4Coder{});
  }
  throw base::UsageError("Payload: " + std::to_string(static_cast<int>(payload)) + " is not a payload");
}

/// Calls each(i) for 0 <= i < count, on the threads of torch; `numbers` of the vector belong to each.
template <typename Each>
void in_parallel(std::int64_t count, std::int64_t numbers, Each&& each) {
  at::parallel_for(0, count, std::max<std::int64_t>(1, kParallelNumbers / numbers),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) each(i);
                   });
}

/// A chunk of a sparse vector: two magnitudes, the indices, two of which share three bytes, and two bits for each.
struct SparseChunk {
  std::int64_t size;
  int sent;  // numbers
  SparseChunk(std::int64_t the_size, int keep)
      : size(the_size), sent(static_cast<int>((keep * size + kSparseChunk - 1) / kSparseChunk)) {}
  std::int64_t index_bytes() const { return (sent * 12 + 7) / 8; }
  std::int64_t bytes() const { return 4 + index_bytes() + (sent + 3) / 4; }
};

/// The magnitudes that `sent` numbers are rounded to, by three steps of k-means, and what separates them. A zero stays
/// a zero.
struct Levels {
  float small, large, middle;
};
Levels fit_levels(const float* magnitudes, int count) {
  Levels levels{};
  const float sum = std::accumulate(magnitudes, magnitudes + count, 0.0F);
  if (const auto zeros = std::count(magnitudes, magnitudes + count, 0.0F); zeros > 0) {
    levels.large = zeros < count ? from_bfloat16(to_bfloat16(sum / static_cast<float>(count - zeros))) : 0;
    return levels;
  }
  levels.middle = sum / static_cast<float>(count);
  for (int step = 0; step < 3; ++step) {
    float sums[2] = {0, 0};
    int counts[2] = {0, 0};
    for (int i = 0; i < count; ++i) {
      const bool is_large = magnitudes[i] > levels.middle;
      sums[is_large] += magnitudes[i];
      ++counts[is_large];
    }
    for (int k = 0; k < 2; ++k)
      (k == 0 ? levels.small : levels.large) =
          from_bfloat16(to_bfloat16(counts[k] > 0 ? sums[k] / static_cast<float>(counts[k]) : levels.middle));
    levels.middle = (levels.small + levels.large) / 2;
  }
  return levels;
}

/// Writes the indices of the largest magnitudes, ascending; of equal ones, the first.
void find_largest(const float* values, const SparseChunk& chunk, std::uint16_t* indices) {
  std::array<std::uint32_t, kSparseChunk> magnitudes;
  for (std::int64_t i = 0; i < chunk.size; ++i) magnitudes[static_cast<std::size_t>(i)] = magnitude_bits(values[i]);
  const auto last = magnitudes.begin() + chunk.sent - 1;
  std::nth_element(magnitudes.begin(), last, magnitudes.begin() + chunk.size, std::greater<>());
  const std::uint32_t least = *last;
  const auto above = std::count_if(magnitudes.begin(), last, [&](std::uint32_t bits) { return bits > least; });
  auto equals = chunk.sent - above;  // how many of magnitude `least` are sent
  int found = 0;
  for (std::int64_t i = 0; found < chunk.sent; ++i) {
    const std::uint32_t bits = magnitude_bits(values[i]);
    if (bits > least || (bits == least && equals-- > 0)) indices[found++] = static_cast<std::uint16_t>(i);
  }
}

void encode_chunk(float* values, const SparseChunk& chunk, std::uint8_t* bytes) {
  std::array<std::uint16_t, kSparseChunk + 1> indices;
  std::array<float, kSparseChunk> magnitudes;
  find_largest(values, chunk, indices.data());
  bool is_finite = true;
  for (int i = 0; i < chunk.sent; ++i) {
    magnitudes[static_cast<std::size_t>(i)] = std::abs(values[indices[static_cast<std::size_t>(i)]]);
    is_finite &= std::isfinite(magnitudes[static_cast<std::size_t>(i)]);
  }
  const Levels levels = is_finite ? fit_levels(magnitudes.data(), chunk.sent) : Levels{kNan, kNan, 0};
  std::memset(bytes, 0, static_cast<std::size_t>(chunk.bytes()));
  write(bytes, to_bfloat16(levels.small));
  write(bytes + 2, to_bfloat16(levels.large));
  std::uint8_t* const places = bytes + 4;
  std::uint8_t* const codes = places + chunk.index_bytes();
  for (int i = 0; i < chunk.sent; ++i) {
    const std::uint32_t index = indices[static_cast<std::size_t>(i)];
    std::uint8_t* const place = places + i / 2 * 3;
    if (i % 2 == 0) {
      place[0] = static_cast<std::uint8_t>(index & 255);
      place[1] = static_cast<std::uint8_t>(index >> 8);
    } else {
      place[1] = static_cast<std::uint8_t>(place[1] | (index & 15) << 4);
      place[2] = static_cast<std::uint8_t>(index >> 4);
    }
    const bool is_large = magnitudes[static_cast<std::size_t>(i)] > levels.middle;
    const bool is_negative = std::signbit(values[index]);
    codes[i / 4] = static_cast<std::uint8_t>(codes[i / 4] | (is_large + 2 * is_negative) << (2 * (i % 4)));
    const float magnitude = is_large ? levels.large : levels.small;
    values[index] -= is_negative ? -magnitude : magnitude;
  }
  if (!is_finite) std::fill_n(values, chunk.size, 0.0F);
}

void add_chunk(const std::uint8_t* bytes, const SparseChunk& chunk, float weight, float* sums) {
  const float magnitudes[2] = {weight * from_bfloat16(read<std::uint16_t>(bytes)),
                               weight * from_bfloat16(read<std::uint16_t>(bytes + 2))};
  const std::uint8_t* const places = bytes + 4;
  const std::uint8_t* const codes = places + chunk.index_bytes();
  for (int i = 0; i < chunk.sent; ++i) {
    const std::uint8_t* const place = places + i / 2 * 3;
    const int index = i % 2 == 0 ? place[0] | (place[1] & 15) << 8 : place[1] >> 4 | place[2] << 4;
    if (index >= chunk.size)
      throw base::UsageError("SparseLoCo: index " + std::to_string(index) + " was received for a chunk of " +
                             std::to_string(chunk.size) + "; expected a smaller one");
    const int code = codes[i / 4] >> (2 * (i % 4));
    sums[index] += code & 2 ? -magnitudes[code & 1] : magnitudes[code & 1];
  }
}

/// Calls each(chunk, first number, first byte) for the chunks of `count` numbers.
template <typename Each>
void for_each_chunk(std::int64_t count, int keep, Each&& each) {
  const std::int64_t full_bytes = SparseChunk(kSparseChunk, keep).bytes();
  in_parallel((count + kSparseChunk - 1) / kSparseChunk, kSparseChunk, [&](std::int64_t i) {
    const std::int64_t first = i * kSparseChunk;
    each(SparseChunk(std::min(kSparseChunk, count - first), keep), first, i * full_bytes);
  });
}

}  // namespace

std::int64_t payload_bytes(Payload payload, std::int64_t count) {
  return with_coder(payload, [&](auto coder) { return count / kPayloadBlock * coder.kBytes; });
}

void encode(Payload payload, float* values, std::int64_t count, std::uint8_t* bytes) {
  with_coder(payload, [&](auto coder) {
    in_parallel(count / kPayloadBlock, kPayloadBlock,
                [&](std::int64_t i) { coder.encode(values + i * kPayloadBlock, bytes + i * coder.kBytes); });
  });
}

void add_decoded(Payload payload, const std::uint8_t* bytes, std::int64_t count, float weight, float* sums) {
  with_coder(payload, [&](auto coder) {
    in_parallel(count / kPayloadBlock, kPayloadBlock,
                [&](std::int64_t i) { coder.add(bytes + i * coder.kBytes, weight, sums + i * kPayloadBlock); });
  });
}

std::int64_t sparse_bytes(std::int64_t count, int keep) {
  const std::int64_t rest = count % kSparseChunk;
  return count / kSparseChunk * SparseChunk(kSparseChunk, keep).bytes() +
         (rest > 0 ? SparseChunk(rest, keep).bytes() : 0);
}

void encode_sparse(float* values, std::int64_t count, int keep, std::uint8_t* bytes) {
  for_each_chunk(count, keep, [&](const SparseChunk& chunk, std::int64_t first, std::int64_t first_byte) {
    encode_chunk(values + first, chunk, bytes + first_byte);
  });
}

void add_sparse(const std::uint8_t* bytes, std::int64_t count, int keep, float weight, float* sums) {
  for_each_chunk(count, keep, [&](const SparseChunk& chunk, std::int64_t first, std::int64_t first_byte) {
    add_chunk(bytes + first_byte, chunk, weight, sums + first);
  });
}

}  // namespace lockstep::ddp::inline outer
