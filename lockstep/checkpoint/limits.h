// The bounds of a safetensors file: those of the reader, which the writer keeps too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::checkpoint {

inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{16} << 20;  // the format allows 100 MB
inline constexpr std::size_t kMaxNameBytes = 1024;
inline constexpr std::size_t kMaxParsedBytes = 12 << 20;  // what is made of a header: about 60,000 tensors
inline constexpr std::size_t kMaxTokenBytes = 1 << 20;  // of one string or number in the header, as written
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr int kMaxDepth = 8;

}  // namespace lockstep::checkpoint
