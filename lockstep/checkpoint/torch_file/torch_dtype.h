// Maps the dtypes of PyTorch's files to torch's.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::checkpoint::inline torch_file {

struct TorchDtype {
  std::string_view name;     ///< torch.NAME
  std::string_view storage;  ///< torch.NAME of its storage class; "" for newer dtypes, which have no such class in
                             ///< Python and are stored in untyped storages there
  c10::ScalarType type;
  std::uint64_t num_bytes;  ///< size of one element
};

/// Returns the dtype with that name, storage class or type, or null. The storage class may also be that of an archive
/// of C++, where newer dtypes have one: "UInt16Storage".
const TorchDtype* find_torch_dtype(std::string_view name);
const TorchDtype* find_torch_storage(std::string_view storage);
const TorchDtype* find_torch_dtype(c10::ScalarType type);

/// Returns "float64, float32, ...", for error messages.
std::string torch_dtype_names();

}  // namespace lockstep::checkpoint::inline torch_file
