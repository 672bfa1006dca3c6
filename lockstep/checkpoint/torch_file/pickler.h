// The reverse of parse_pickle(): a tree as a pickle of protocol 2.
#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint {

/// Where a tensor is found in the file.
struct StoredTensor {
  std::string storage;             ///< its key
  std::uint64_t num_elements = 0;  ///< of the storage, in the tensor's dtype
  std::int64_t offset = 0;         ///< in elements
  std::vector<std::int64_t> sizes, strides;
};

/// `place` is asked once for each tensor, in their order. Throws UsageError: see save_torch_file().
std::string to_pickle(const Value& value, const std::function<StoredTensor(const at::Tensor&)>& locate);

}  // namespace lockstep::checkpoint
