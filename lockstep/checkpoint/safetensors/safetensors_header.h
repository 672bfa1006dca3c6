// The header of a safetensors file: which tensor lies where. Read without trust, without torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/safetensors/safetensors_dtype.h"

namespace lockstep::checkpoint {

/// Where a tensor lies: bytes [begin, end) of what follows the header.
struct TensorEntry {
  const SafetensorsDtype* dtype = nullptr;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;  ///< of the key "__metadata__"
};

/// Where the header's text begins: after its length as a little-endian u64.
inline constexpr std::uint64_t kHeaderOffset = 8;

/// Reads the header's text, which `num_data_bytes` of tensors follow. Everything is checked: the bounds of limits.h,
/// JSON without a key that is there twice, names of valid UTF-8, only the fields and dtypes of the format, shapes whose
/// product is the number of bytes, and tensors that fill the data from its first byte to its last without a hole or an
/// overlap. Throws FormatError "FILE:OFFSET: reason"; the offset is in the file, at or just behind what is wrong. Takes
/// at most 16 MiB beside the text.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t num_data_bytes, const std::string& file);

}  // namespace lockstep::checkpoint
