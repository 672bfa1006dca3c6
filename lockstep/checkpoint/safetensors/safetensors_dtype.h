// Maps the dtypes of safetensors to torch's.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

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

}  // namespace lockstep::checkpoint::inline safetensors
