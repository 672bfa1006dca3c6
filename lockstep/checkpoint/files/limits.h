// The limits of the readers. The writers respect them as well.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::checkpoint::files {

// Limits of a safetensors file.
inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{16} << 20;  // the format allows 100 MB
inline constexpr std::size_t kMaxNameBytes = 1024;
inline constexpr std::size_t kMaxParsedBytes = 12 << 20;  // memory of a parsed header: about 60,000 tensors
inline constexpr std::size_t kMaxTokenBytes = 1 << 20;    // one string or number in the header, as written
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr int kMaxDepth = 8;

// Limits of PyTorch's files.
inline constexpr std::uint64_t kMaxZipRecords = 200'000;
inline constexpr std::uint64_t kMaxZipDirectoryBytes = std::uint64_t{64} << 20;
inline constexpr std::uint64_t kMaxPickleBytes = std::uint64_t{32} << 20;
inline constexpr std::uint64_t kMaxTreeBytes = std::uint64_t{128}
                                               << 20;  // memory of a parsed pickle: about 60,000 tensors
inline constexpr std::size_t kMaxTreeDepth = 64;

// Limit of a checkpoint's manifest and of its JSON files.
inline constexpr std::size_t kMaxJsonBytes = 16 << 20;

}  // namespace lockstep::checkpoint::files
