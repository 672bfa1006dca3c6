// The dtypes of PyTorch's files: how a storage of each is called there.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

struct TorchDtype {
  std::string_view name;     ///< torch.NAME
  std::string_view storage;  ///< torch.NAME of its storages; "" for dtypes that are younger than these classes, and lie
                             ///< in storages of bytes
  c10::ScalarType type;
  std::uint64_t num_bytes;  ///< of one element
};

/// The row of the table; null for none.
const TorchDtype* find_torch_dtype(std::string_view name);
const TorchDtype* find_torch_storage(std::string_view storage);
const TorchDtype* find_torch_dtype(c10::ScalarType type);

/// "float64, float32, ...": for messages.
std::string torch_dtype_names();

}  // namespace lockstep::checkpoint
