// The dtypes of safetensors, and the header of a file, parsed from an untrusted source. Needs headers of torch only.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint::inline safetensors {

struct SafetensorsDtype {
  std::string_view name;  ///< "F32"
  c10::ScalarType type;
  std::uint64_t num_bytes;  ///< size of one element
};

/// Returns the dtype with that name or type, or null.
const SafetensorsDtype* find_dtype(std::string_view name);
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// Returns "F64, F32, ...", for error messages.
std::string dtype_names();

/// A tensor of the file: bytes [begin, end) of the data that follow the header.
struct TensorEntry {
  const SafetensorsDtype* dtype = nullptr;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;  ///< the entries of the key "__metadata__"
};

/// The offset of the header's text, which follows its length as a little-endian u64.
inline constexpr std::uint64_t kHeaderOffset = 8;

/// Parses the header's text, which `num_data_bytes` bytes of tensors follow. Checks everything: the limits of limits.h,
/// JSON without duplicate keys, names of valid UTF-8, only the fields and dtypes of the format, shapes whose product
/// matches the number of bytes, and tensors that cover the data without a gap or an overlap. Throws FormatError
/// "FILE:OFFSET: reason"; the offset is in the file, at or just after the error. Allocates at most 16 MiB in addition
/// to the text.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t num_data_bytes, const std::string& file);

}  // namespace lockstep::checkpoint::inline safetensors
