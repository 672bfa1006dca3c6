// The contents of a file of torch.save() as a tree of values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep::checkpoint::inline torch_file {

struct Value;

/// Python's None.
struct None {
  bool operator==(const None&) const = default;
};
struct ByteString {
  std::string bytes;
};
/// A list, a tuple (torch.Size is one) or a set.
struct Sequence {
  enum class Kind { kList, kTuple, kSet };
  Kind kind = Kind::kList;
  std::vector<Value> items;
};
/// A dictionary in insertion order. Keys are not hashed: find() searches linearly.
struct Dict {
  struct Item;
  std::vector<Item> items;
  bool ordered = false;  ///< collections.OrderedDict, which a module's state_dict() is
  bool module = false;   ///< a module, optimizer or other object of torch::save() in C++, with its members by name; is
                         ///< saved as a dictionary

  /// Returns the value of a string or integer key, or null.
  const Value* find(std::string_view key) const;
  const Value* find(std::int64_t key) const;
  /// Appends an item. Duplicate keys are an error when the tree is saved.
  void add(Value key, Value value);
};

struct Value {
  using Any = std::variant<None, bool, std::int64_t, double, std::string, ByteString, Sequence, Dict, at::Tensor>;
  Any any;

  Value() = default;
  Value(None) {}
  Value(bool value) : any(value) {}
  Value(int value) : any(std::int64_t{value}) {}
  Value(std::int64_t value) : any(value) {}
  Value(double value) : any(value) {}
  Value(const char* value) : any(std::string(value)) {}
  Value(std::string value) : any(std::move(value)) {}
  Value(ByteString value) : any(std::move(value)) {}
  Value(Sequence value) : any(std::move(value)) {}
  Value(Dict value) : any(std::move(value)) {}
  Value(at::Tensor value) : any(std::move(value)) {}

  /// Returns the value if it is a T, otherwise null.
  template <typename T>
  const T* as() const {
    return std::get_if<T>(&any);
  }
};

struct Dict::Item {
  Value key, value;
};

/// Returns "a dictionary", "a tensor" ..., for error messages.
std::string_view kind_of(const Value& value);

}  // namespace lockstep::checkpoint::inline torch_file
