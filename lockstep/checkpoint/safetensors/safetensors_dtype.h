// The dtypes of safetensors, and torch's.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

struct SafetensorsDtype {
  std::string_view name;  ///< "F32"
  c10::ScalarType type;
  std::uint64_t num_bytes;  ///< of one element
};

/// The row of the table with that name; null for none.
const SafetensorsDtype* find_dtype(std::string_view name);
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// "F64, F32, ...": for messages.
std::string dtype_names();

}  // namespace lockstep::checkpoint
