// Writes a tree as a pickle of protocol 2, the reverse of parse_pickle().
#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint::inline torch_file {

/// The location of a tensor in the file.
struct StoredTensor {
  std::string storage;             ///< key of the storage
  std::uint64_t num_elements = 0;  ///< size of the storage, in elements of the tensor's dtype
  std::int64_t offset = 0;         ///< offset in the storage, in elements
  std::vector<std::int64_t> sizes, strides;
};

/// Calls `locate` once for each tensor, in the order of the tree. Throws UsageError as save_torch_file() does.
std::string to_pickle(const Value& value, const std::function<StoredTensor(const at::Tensor&)>& locate);

}  // namespace lockstep::checkpoint::inline torch_file
