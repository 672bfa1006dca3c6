// The function calls of a pickle. A call is not executed: it only records the value that it would return.
#include <algorithm>

#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/unpickler.h"

namespace lockstep::checkpoint::inline torch_file {

void Unpickler::reduce() {
  using Callable = Pickle::Callable;
  using Kind = Pickle::Kind;
  const std::vector<Index>& arguments = as_items(pop(), Kind::kTuple, "a tuple of arguments").items;
  const auto function = as<Callable>(pop(), "a function to call");
  const auto check_num_arguments = [&](std::size_t min_count, std::size_t max_count) {
    if (arguments.size() < min_count || arguments.size() > max_count)
      throw_format_error("a call with " + std::to_string(arguments.size()) + " arguments");
  };
  const auto copy_items = [&](Kind from, Kind to, const char* what) {
    Pickle::Container container{to, as_items(arguments[0], from, what).items};
    charge(container.items.size() * sizeof(Index));
    return container;
  };
  switch (function) {
    case Callable::kOrderedDict:
      check_num_arguments(0, 0);
      return push_value(Pickle::Container{Kind::kOrderedDict, {}});
    case Callable::kCounter:
      check_num_arguments(1, 1);
      return push_value(copy_items(Kind::kDict, Kind::kDict, "a dictionary of counts"));
    case Callable::kSet:
      check_num_arguments(1, 1);
      return push_value(copy_items(Kind::kList, Kind::kSet, "a set's list"));
    case Callable::kSize:
      check_num_arguments(1, 1);
      return push_value(copy_items(Kind::kTuple, Kind::kTuple, "a size's tuple"));
    case Callable::kEncode: check_num_arguments(2, 2); return push_value(encode_latin1(arguments));
    case Callable::kTensor: check_num_arguments(4, 4); return push_value(rebuild_tensor(function, arguments));
    case Callable::kTensorV2: check_num_arguments(6, 7); return push_value(rebuild_tensor(function, arguments));
    case Callable::kTensorV3: check_num_arguments(7, 8); return push_value(rebuild_tensor(function, arguments));
    case Callable::kParameter: check_num_arguments(3, 3); return push_value(rebuild_parameter(arguments));
    case Callable::kParameterWithState: check_num_arguments(4, 4); return push_value(rebuild_parameter(arguments));
  }
}

// Protocol 2 stores bytes as a string with one character per byte, whose code point is the byte's value.
Pickle::Value Unpickler::encode_latin1(const std::vector<Index>& arguments) {
  const auto text = as<std::string_view>(arguments[0], "a string to encode");
  if (as<std::string_view>(arguments[1], "an encoding") != "latin1")
    throw_format_error("an encoding other than latin1");
  charge(text.size() + sizeof(std::string));
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte > 0xc3) throw_format_error("a byte of more than 255");
    // The string is valid UTF-8, so one byte follows 0xc2 and 0xc3.
    bytes += static_cast<char>(byte < 0x80 ? byte : (byte & 3) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3f));
  }
  pickle_.decoded_strings.push_back(std::move(bytes));
  return Pickle::ByteString{pickle_.decoded_strings.back()};
}

std::vector<std::int64_t> Unpickler::as_sizes(Index value, const char* what) const {
  const auto& tuple = as_items(value, Pickle::Kind::kTuple, what);
  if (tuple.items.size() > files::kMaxDimensions) throw_format_error("a tensor of more than 64 dimensions");
  std::vector<std::int64_t> numbers;
  for (const Index item : tuple.items) {
    numbers.push_back(as<std::int64_t>(item, what));
    if (numbers.back() < 0) throw_format_error(std::string(what) + " of " + std::to_string(numbers.back()));
  }
  return numbers;
}

// (storage, offset, size, stride[, requires_grad, hooks[, dtype][, metadata]])
Pickle::Value Unpickler::rebuild_tensor(Pickle::Callable function, const std::vector<Index>& arguments) {
  const bool is_untyped = function == Pickle::Callable::kTensorV3;
  Pickle::Tensor tensor;
  tensor.storage = as<Pickle::StorageRef>(arguments[0], "a storage").index;
  tensor.offset = as<std::int64_t>(arguments[1], "an offset");
  tensor.sizes = as_sizes(arguments[2], "a tensor's size");
  tensor.strides = as_sizes(arguments[3], "a tensor's stride");
  if (arguments.size() > 4) tensor.requires_grad = as<bool>(arguments[4], "requires_grad");
  const Pickle::Storage& storage = pickle_.storages[tensor.storage];
  tensor.dtype = is_untyped ? as<const TorchDtype*>(arguments[6], "a dtype") : storage.dtype;
  if (!tensor.dtype || (is_untyped && storage.dtype)) throw_format_error("a tensor whose storage has no dtype, or two");
  const std::size_t num_expected = is_untyped ? 7 : 6;
  if (arguments.size() > num_expected &&
      !std::holds_alternative<Pickle::None>(pickle_.values[arguments[num_expected]]) &&
      !as_items(arguments[num_expected], Pickle::Kind::kDict, "a tensor's metadata").items.empty())
    throw_format_error(
        "a lazily conjugated or negated tensor. Call resolve_conj() and resolve_neg() before saving it.");
  using c10::ScalarType;
  if (tensor.requires_grad && !c10::isFloatingType(tensor.dtype->type) && !c10::isComplexType(tensor.dtype->type))
    throw_format_error("a tensor of " + std::string(tensor.dtype->name) + " that requires a gradient");
  check_extent(tensor, is_untyped ? storage.num_elements / tensor.dtype->num_bytes : storage.num_elements);
  charge(sizeof(Pickle::Tensor) + (tensor.sizes.size() + tensor.strides.size()) * 2 * sizeof(std::int64_t));
  pickle_.tensors.push_back(std::move(tensor));
  return Pickle::TensorRef{static_cast<std::uint32_t>(pickle_.tensors.size() - 1)};
}

// Checks that every element lies in the storage. An extent of 0 must not hide an overflow, because torch multiplies the
// other extents for its strides.
void Unpickler::check_extent(const Pickle::Tensor& tensor, std::uint64_t num_elements) const {
  std::uint64_t num_bytes = tensor.dtype->num_bytes, last = static_cast<std::uint64_t>(tensor.offset), step = 0;
  bool empty = false, overflow = tensor.offset < 0 || tensor.sizes.size() != tensor.strides.size();
  for (std::size_t i = 0; i < tensor.sizes.size() && !overflow; ++i) {
    const auto extent = static_cast<std::uint64_t>(std::max<std::int64_t>(tensor.sizes[i], 1));
    empty = empty || tensor.sizes[i] == 0;
    overflow = __builtin_mul_overflow(num_bytes, extent, &num_bytes) ||
               __builtin_mul_overflow(extent - 1, static_cast<std::uint64_t>(tensor.strides[i]), &step) ||
               __builtin_add_overflow(last, step, &last);
  }
  overflow = overflow || num_bytes > INT64_MAX;
  if (overflow || (empty ? static_cast<std::uint64_t>(tensor.offset) > num_elements : last >= num_elements))
    throw_format_error("a tensor of " + std::string(tensor.dtype->name) + " that lies outside its storage of " +
                       std::to_string(num_elements) + " elements");
}

// (tensor, requires_grad, hooks[, attributes])
Pickle::Value Unpickler::rebuild_parameter(const std::vector<Index>& arguments) {
  Pickle::Tensor tensor = pickle_.tensors[as<Pickle::TensorRef>(arguments[0], "a parameter's tensor").index];
  tensor.requires_grad = as<bool>(arguments[1], "requires_grad");
  if (tensor.requires_grad && !c10::isFloatingType(tensor.dtype->type) && !c10::isComplexType(tensor.dtype->type))
    throw_format_error("a parameter of " + std::string(tensor.dtype->name) + " that requires a gradient");
  charge(sizeof(Pickle::Tensor) + (tensor.sizes.size() + tensor.strides.size()) * 2 * sizeof(std::int64_t));
  pickle_.tensors.push_back(std::move(tensor));
  return Pickle::TensorRef{static_cast<std::uint32_t>(pickle_.tensors.size() - 1)};
}

}  // namespace lockstep::checkpoint::inline torch_file
