// What stands in data.pkl of a file of torch.save(): values that refer to each other. Read without trust, without
// torch; nothing in it is ever executed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/torch_file/torch_dtype.h"

namespace lockstep::checkpoint {

struct Pickle {
  /// A value's place in `values`.
  using Index = std::uint32_t;

  struct None {};
  struct ByteString {
    std::string_view bytes;
  };
  enum class Kind : std::uint8_t { kList, kTuple, kSet, kDict, kOrderedDict };
  struct Container {
    Kind kind;
    std::vector<Index> items;  ///< of dictionaries: key, value, key, value ...
  };
  struct Storage {
    std::string key;                    ///< its record is data/KEY
    const TorchDtype* dtype = nullptr;  ///< null: bytes
    std::uint64_t num_elements = 0;
  };
  /// All elements lie inside of the storage; strides may be 0.
  struct Tensor {
    std::uint32_t storage = 0;  ///< its place in `storages`
    const TorchDtype* dtype = nullptr;
    std::int64_t offset = 0;  ///< in elements
    std::vector<std::int64_t> sizes, strides;
    bool requires_grad = false;
  };
  struct TensorRef {
    std::uint32_t index;  ///< in `tensors`
  };
  /// What may be called; gone when the pickle has been read.
  enum class Callable : std::uint8_t {
    kOrderedDict,
    kCounter,
    kSet,
    kSize,
    kEncode,
    kTensor,
    kTensorV2,
    kTensorV3,
    kParameter,
    kParameterWithState
  };
  struct StorageType {
    const TorchDtype* dtype;  ///< null: of bytes
  };
  struct StorageRef {
    std::uint32_t index;  ///< in `storages`
  };
  using Value = std::variant<None, bool, std::int64_t, double, std::string_view, ByteString, Container, TensorRef,
                             Callable, StorageType, StorageRef, const TorchDtype*>;

  std::vector<Value> values;
  std::vector<std::uint32_t> offsets;  ///< of each value, in the pickle
  Index root = 0;
  std::vector<Storage> storages;
  std::vector<Tensor> tensors;
  std::deque<std::string> decoded_strings;  ///< what string_views point to that do not point into the pickle
};

/// Reads the opcodes and the globals that torch.load(weights_only=True) has, in protocol 2, for values that are None,
/// bool, numbers, strings, bytes, lists, tuples, sets, dictionaries and dense tensors: collections.OrderedDict and
/// Counter, torch.Size, _codecs.encode, set, the functions that rebuild tensors and parameters, storages and dtypes.
/// Refuses everything else. The result is checked: it is a tree when what is shared is repeated, at most 64 levels deep
/// and of at most 128 MiB (limits.h), without a key that is there twice; tensors lie in their storages; strings are
/// UTF-8. `bytes` must outlive it. Throws FormatError "FILE:OFFSET: reason", where `begin` is the pickle's place in the
/// file.
Pickle parse_pickle(std::string_view bytes, const std::string& file, std::uint64_t begin);

}  // namespace lockstep::checkpoint
