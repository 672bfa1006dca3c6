// The bounds of files: those of the readers, which the writers keep too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::checkpoint {

// Of a safetensors file.
inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{16} << 20;  // the format allows 100 MB
inline constexpr std::size_t kMaxNameBytes = 1024;
inline constexpr std::size_t kMaxParsedBytes = 12 << 20;  // what is made of a header: about 60,000 tensors
inline constexpr std::size_t kMaxTokenBytes = 1 << 20;    // of one string or number in the header, as written
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr int kMaxDepth = 8;

// Of PyTorch's files.
inline constexpr std::uint64_t kMaxZipRecords = 200'000;
inline constexpr std::uint64_t kMaxZipDirectoryBytes = std::uint64_t{64} << 20;
inline constexpr std::uint64_t kMaxPickleBytes = std::uint64_t{32} << 20;
inline constexpr std::uint64_t kMaxTreeBytes = std::uint64_t{128}
                                               << 20;  // what is made of a pickle: about 60,000 tensors
inline constexpr std::size_t kMaxTreeDepth = 64;

// Of a checkpoint's manifest and plain values.
inline constexpr std::size_t kMaxJsonBytes = 16 << 20;

}  // namespace lockstep::checkpoint
