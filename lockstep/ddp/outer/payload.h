// Encodes numbers for a slow network. Decoding is elementwise and never contracts a multiplication and an addition, so
// that hosts with different CPUs hold the same bits.
#pragma once

#include <cstdint>

#include "lockstep/ddp/outer/outer_options.h"

namespace lockstep::ddp::inline outer {

/// Numbers are encoded in blocks of so many.
inline constexpr std::int64_t kPayloadBlock = 256;

/// The bytes of `count` numbers, a multiple of kPayloadBlock.
std::int64_t payload_bytes(Payload payload, std::int64_t count);

/// Encodes `count` numbers, and leaves in `values` what each has lost: the value less the decoded one. A block with an
/// infinity or a NaN loses nothing; as int8 or int4 all of it decodes to NaNs, otherwise these numbers arrive as they
/// are.
void encode(Payload payload, float* values, std::int64_t count, std::uint8_t* bytes);

/// Adds `weight` times the decoded numbers to `sums`.
void add_decoded(Payload payload, const std::uint8_t* bytes, std::int64_t count, float weight, float* sums);

/// Of a vector that is sent sparsely, in chunks of 4096 (the last may be shorter): the numbers of largest magnitude,
/// `keep` of 4096 and in proportion of a shorter chunk; of equal ones those that come first. Each is sent as its index,
/// its sign, and one bit that chooses between the two magnitudes of the chunk, to which what is sent was rounded. With
/// an infinity or a NaN, all that is sent decodes to NaNs, and nothing is lost.
inline constexpr std::int64_t kSparseChunk = 4096;
std::int64_t sparse_bytes(std::int64_t count, int keep);
void encode_sparse(float* values, std::int64_t count, int keep, std::uint8_t* bytes);  ///< `values` as in encode()
void add_sparse(const std::uint8_t* bytes, std::int64_t count, int keep, float weight, float* sums);

}  // namespace lockstep::ddp::inline outer
