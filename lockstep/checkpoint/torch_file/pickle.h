// The contents of data.pkl in a file of torch.save(): values that refer to each other. Parsed from an untrusted source,
// without torch; nothing in it is executed.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/torch_file/torch_dtype.h"

namespace lockstep::checkpoint::inline torch_file {

struct Pickle {
  /// The index of a value in `values`.
  using Index = std::uint32_t;

  struct None {};
  struct ByteString {
    std::string_view bytes;
  };
  enum class Kind : std::uint8_t { kList, kTuple, kSet, kDict, kOrderedDict, kModule };
  struct Container {
    Kind kind;
    std::vector<Index> items;  ///< for dictionaries and modules: key, value, key, value ...
  };
  struct Storage {
    std::string key;                    ///< its record in the archive is data/KEY
    const TorchDtype* dtype = nullptr;  ///< null for untyped bytes
    std::uint64_t num_elements = 0;
  };
  /// All elements lie inside the storage; strides may be 0.
  struct Tensor {
    std::uint32_t storage = 0;  ///< index in `storages`
    const TorchDtype* dtype = nullptr;
    std::int64_t offset = 0;  ///< offset in the storage, in elements
    std::vector<std::int64_t> sizes, strides;
    bool requires_grad = false;
  };
  struct TensorRef {
    std::uint32_t index;  ///< index in `tensors`
  };
  /// The functions that a pickle may call. They do not occur in a parsed pickle.
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
    const TorchDtype* dtype;  ///< null for untyped bytes
  };
  struct StorageRef {
    std::uint32_t index;  ///< index in `storages`
  };
  /// The class of a module in an archive of torch::save() in C++.
  struct ModuleClass {};
  using Value = std::variant<None, bool, std::int64_t, double, std::string_view, ByteString, Container, TensorRef,
                             Callable, StorageType, StorageRef, const TorchDtype*, ModuleClass>;

  std::vector<Value> values;
  std::vector<std::uint32_t> offsets;  ///< offset of each value in the pickle
  Index root = 0;
  std::vector<Storage> storages;
  std::vector<Tensor> tensors;
  std::deque<std::string> decoded_strings;  ///< owns the strings that are not views into the pickle itself
};

/// Parses a pickle of protocol 2 with the opcodes and globals that torch.load(weights_only=True) accepts. Accepted
/// values are None, bools, numbers, strings, bytes, lists, tuples, sets, dictionaries and dense tensors; accepted
/// globals are collections.OrderedDict and Counter, torch.Size, _codecs.encode, set, the functions that rebuild tensors
/// and parameters, storages and dtypes. In addition accepts the modules of torch::save() in C++: an object without
/// arguments of a class in the package __torch__, whose attributes have names. Rejects everything else. The result is
/// validated: with shared values expanded
/// it is a tree of at most 64 levels and 128 MiB (limits.h) without duplicate keys; tensors lie inside their storages;
/// strings are UTF-8. `bytes` must outlive the result. Throws FormatError "FILE:OFFSET: reason"; `begin` is the offset
/// of the pickle in the file.
Pickle parse_pickle(std::string_view bytes, const std::string& file, std::uint64_t begin);

/// Checks what parse_pickle() does not check while it parses: depth, size, keys, and that every value may occur in a
/// tree. Throws FormatError. parse_pickle() calls it.
void validate_pickle(const Pickle& pickle, const std::string& file, std::uint64_t begin);

}  // namespace lockstep::checkpoint::inline torch_file
