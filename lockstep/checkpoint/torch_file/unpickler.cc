// The stack machine that executes a pickle's opcodes.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/pickle.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

// The cost of values without memory of their own: about that of a container's item, including the vectors' spare
// capacity.
constexpr std::size_t kPushBytes = 2 * sizeof(Pickle::Index);
constexpr std::size_t kMemoBytes = 48;  // one entry of a std::unordered_map
constexpr std::size_t kValueBytes = 2 * (sizeof(Pickle::Value) + sizeof(std::uint32_t));

struct GlobalName {
  std::string_view module, name;
  Pickle::Callable function;
};
constexpr std::array kGlobals = {
    GlobalName{"collections", "OrderedDict", Pickle::Callable::kOrderedDict},
    GlobalName{"collections", "Counter", Pickle::Callable::kCounter},
    GlobalName{"__builtin__", "set", Pickle::Callable::kSet},
    GlobalName{"builtins", "set", Pickle::Callable::kSet},
    GlobalName{"torch", "Size", Pickle::Callable::kSize},
    GlobalName{"_codecs", "encode", Pickle::Callable::kEncode},
    GlobalName{"torch._utils", "_rebuild_tensor", Pickle::Callable::kTensor},
    GlobalName{"torch._utils", "_rebuild_tensor_v2", Pickle::Callable::kTensorV2},
    GlobalName{"torch._utils", "_rebuild_tensor_v3", Pickle::Callable::kTensorV3},
    GlobalName{"torch._utils", "_rebuild_parameter", Pickle::Callable::kParameter},
    GlobalName{"torch._utils", "_rebuild_parameter_with_state", Pickle::Callable::kParameterWithState},
};

// The least and the greatest number of arguments, by Pickle::Callable.
constexpr std::pair<std::size_t, std::size_t> kNumArguments[] = {{0, 0}, {1, 1}, {1, 1}, {1, 1}, {2, 2},
                                                                 {4, 4}, {6, 7}, {7, 8}, {3, 3}, {4, 4}};

class Unpickler {
 public:
  using Index = Pickle::Index;

  Unpickler(std::string_view bytes, const std::string& file, std::uint64_t begin)
      : bytes_(bytes), file_(file), begin_(begin) {}

  /// Executes the pickle until the opcode STOP.
  Pickle run() {
    if (bytes_.size() > files::kMaxPickleBytes)
      throw_format_error("the pickle has " + std::to_string(bytes_.size()) + " bytes; expected at most 32 MiB");
    while (!is_stopped_) {
      opcode_offset_ = position_;
      execute(static_cast<unsigned char>(read_bytes(1)[0]));
    }
    if (stack_.size() != 1 || !marks_.empty()) throw_format_error("expected one value on the stack at the end");
    pickle_.root = stack_.back();
    return std::move(pickle_);
  }

 private:
  [[noreturn]] void throw_format_error(const std::string& reason) const {
    throw base::FormatError(file_ + ":" + std::to_string(begin_ + opcode_offset_) + ": " + reason);
  }

  /// Counts memory that the pickle requests; throws FormatError above the limit.
  void charge(std::size_t num_bytes) {
    num_charged_bytes_ += num_bytes;
    if (num_charged_bytes_ > files::kMaxTreeBytes)
      throw_format_error("the pickle takes more than the limit of 128 MiB");
  }

  std::string_view read_bytes(std::size_t num_bytes) {
    if (num_bytes > bytes_.size() - position_)
      throw_format_error("the pickle ends here; expected " + std::to_string(num_bytes) + " more bytes");
    const auto result = bytes_.substr(position_, num_bytes);
    position_ += num_bytes;
    return result;
  }

  std::string_view read_line() {
    const auto end = bytes_.substr(position_, files::kMaxNameBytes).find('\n');
    if (end == std::string_view::npos) throw_format_error("a name of more than 1024 bytes");
    const auto line = read_bytes(end);
    ++position_;
    return line;
  }

  std::uint64_t read_uint(std::size_t num_bytes) {
    const auto text = read_bytes(num_bytes);
    std::uint64_t number = 0;
    std::memcpy(&number, text.data(), num_bytes);
    return number;
  }

  void execute(unsigned char opcode) {
    using Kind = Pickle::Kind;
    switch (opcode) {
      case 0x80:
        return read_uint(1) == 2 ? void() : throw_format_error("a protocol other than 2, which torch.save() writes");
      case '.': is_stopped_ = true; return;
      case '(': marks_.push_back(stack_.size()); return charge(2 * sizeof(std::size_t));
      case 'N': return push_value(Pickle::None{});
      case 0x88: return push_value(true);
      case 0x89: return push_value(false);
      case 'K': return push_int(1);
      case 'M': return push_int(2);
      case 'J': return push_int(4);
      case 0x8a: return push_long();
      case 'G': return push_float();
      case 'X': return push_string(read_uint(4));
      case 'U': return push_string(read_uint(1));
      case ')': return push_value(Pickle::Container{Kind::kTuple, {}});
      case ']': return push_value(Pickle::Container{Kind::kList, {}});
      case '}': return push_value(Pickle::Container{Kind::kDict, {}});
      case 0x8f: return push_value(Pickle::Container{Kind::kSet, {}});
      case 0x85: return push_tuple(1);
      case 0x86: return push_tuple(2);
      case 0x87: return push_tuple(3);
      case 't': return push_tuple(stack_.size() - pop_mark());
      case 'a': return append_items(false, stack_.size() - 1);
      case 's': return append_items(true, stack_.size() - 2);
      case 'e': return append_items(false, pop_mark());
      case 'u': return append_items(true, pop_mark());
      case 'c': return push_global();
      case 'R': return reduce();
      case 0x81: return push_module();
      case 'b': return build();
      case 'Q': return push_storage();
      case 'q': return memo_put(read_uint(1));
      case 'r': return memo_put(read_uint(4));
      case 'h': return memo_get(read_uint(1));
      case 'j': return memo_get(read_uint(4));
      default: throw_format_error("unsupported opcode " + std::to_string(opcode));
    }
  }

  void push(Index value) {
    charge(kPushBytes);
    stack_.push_back(value);
  }

  void push_value(Pickle::Value value) {
    charge(kValueBytes);
    pickle_.values.push_back(std::move(value));
    pickle_.offsets.push_back(static_cast<std::uint32_t>(opcode_offset_));
    push(static_cast<Index>(pickle_.values.size() - 1));
  }

  Index pop() {
    const Index value = top();
    stack_.pop_back();
    return value;
  }

  Index top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) throw_format_error("expected a value on the stack");
    return stack_.back();
  }

  std::size_t pop_mark() {
    if (marks_.empty()) throw_format_error("expected a mark on the stack");
    const std::size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }

  void push_int(std::size_t num_bytes) {
    const std::uint64_t number = read_uint(num_bytes);
    push_value(num_bytes == 4 ? std::int64_t{static_cast<std::int32_t>(number)} : static_cast<std::int64_t>(number));
  }

  void push_long() {
    const std::size_t num_bytes = read_uint(1);
    if (num_bytes > 8) throw_format_error("an integer of more than 64 bits");
    std::uint64_t number = read_uint(num_bytes);
    if (num_bytes > 0 && num_bytes < 8 && (number >> (8 * num_bytes - 1)) != 0)
      number |= ~std::uint64_t{0} << (8 * num_bytes);
    push_value(static_cast<std::int64_t>(number));
  }

  void push_float() {
    std::uint64_t number = read_uint(8);  // big-endian
    number = __builtin_bswap64(number);
    push_value(std::bit_cast<double>(number));
  }

  void push_string(std::size_t num_bytes) {
    const auto text = read_bytes(num_bytes);
    if (!base::is_utf8(text)) throw_format_error("a string that is not UTF-8");
    push_value(text);
  }

  void push_tuple(std::size_t num_items) {
    const std::size_t stack_base = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() - stack_base < num_items)
      throw_format_error("expected " + std::to_string(num_items) + " values for a tuple on the stack");
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(num_items);
    Pickle::Container tuple{Pickle::Kind::kTuple, {first, stack_.end()}};
    charge(num_items * sizeof(Index));
    stack_.erase(first, stack_.end());
    push_value(std::move(tuple));
  }

  // Moves the stack's values from `first` on into the list or dictionary below them.
  void append_items(bool is_dict, std::size_t first) {
    const std::size_t stack_base = marks_.empty() ? 0 : marks_.back();
    if (first <= stack_base || first > stack_.size())
      throw_format_error("expected a list or a dictionary on the stack");
    auto* const container = std::get_if<Pickle::Container>(&pickle_.values[stack_[first - 1]]);
    using Kind = Pickle::Kind;
    const bool fits = container && (is_dict ? container->kind == Kind::kDict || container->kind == Kind::kOrderedDict
                                            : container->kind == Kind::kList);
    if (!fits || (is_dict && (stack_.size() - first) % 2 != 0))
      throw_format_error(is_dict ? "expected a dictionary and pairs on the stack" : "expected a list on the stack");
    charge((stack_.size() - first) * kPushBytes);
    container->items.insert(container->items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
    stack_.resize(first);
  }

  void push_global() {
    const auto module = read_line(), name = read_line();
    for (const GlobalName& global : kGlobals)
      if (global.module == module && global.name == name) return push_value(global.function);
    if (module == "torch") {
      if (const TorchDtype* const dtype = find_torch_storage(name)) return push_value(Pickle::StorageType{dtype});
      if (const TorchDtype* const dtype = find_torch_dtype(name)) return push_value(dtype);
    }
    if (name == "UntypedStorage" && (module == "torch.storage" || module == "torch"))
      return push_value(Pickle::StorageType{nullptr});
    if (module == "__torch__" || module.starts_with("__torch__.")) return push_value(Pickle::ModuleClass{});
    throw_format_error(
        "unsupported global " + base::quoted(std::string(module) + "." + std::string(name), 120) +
        "; expected one of a state_dict (tensors, parameters, dictionaries, lists, sets, strings, bytes and numbers), "
        "with the dtypes " +
        torch_dtype_names());
  }

  void push_storage() {
    const auto& id = as_items(pop(), Pickle::Kind::kTuple, "a tuple that names a storage");
    if (id.items.size() != 5 || as<std::string_view>(id.items[0], "the word \"storage\"") != "storage")
      throw_format_error("expected (\"storage\", type, key, location, number)");
    const auto key = std::string(as<std::string_view>(id.items[2], "a storage's key"));
    const auto number = as<std::int64_t>(id.items[4], "a storage's number of elements");
    const auto* const dtype = as<Pickle::StorageType>(id.items[1], "a storage's type").dtype;
    if (key.empty() || key.size() > 64 || key.find('/') != std::string::npos || number < 0 || number > INT64_MAX / 16)
      throw_format_error("invalid storage " + base::quoted(key, 80) + " of " + std::to_string(number) + " elements");
    const auto [found, is_new] = storages_.emplace(key, static_cast<std::uint32_t>(pickle_.storages.size()));
    if (is_new) {
      charge(sizeof(Pickle::Storage) + kMemoBytes + 2 * key.size());
      pickle_.storages.push_back({key, dtype, static_cast<std::uint64_t>(number)});
    }
    const auto& storage = pickle_.storages[found->second];
    if (storage.dtype != dtype || storage.num_elements != static_cast<std::uint64_t>(number))
      throw_format_error("the storage " + base::quoted(key, 80) + " occurs twice, with different types or sizes");
    push_value(Pickle::StorageRef{found->second});
  }

  void push_module() {
    if (!as_items(pop(), Pickle::Kind::kTuple, "a tuple of arguments").items.empty())
      throw_format_error("a module with arguments");
    as<Pickle::ModuleClass>(pop(), "the class of a module");
    push_value(Pickle::Container{Pickle::Kind::kModule, {}});
  }

  // Sets the attributes of a module. Drops those of an OrderedDict: a state_dict has "_metadata" with the versions of
  // Python's modules.
  void build() {
    const Index attributes = pop();
    auto* const built = std::get_if<Pickle::Container>(&pickle_.values[top()]);
    if (!built || (built->kind != Pickle::Kind::kOrderedDict && built->kind != Pickle::Kind::kModule))
      throw_format_error("attributes of a value that is neither an OrderedDict nor a module");
    if (built->kind == Pickle::Kind::kOrderedDict) return;
    const auto& items = as_items(attributes, Pickle::Kind::kDict, "a dictionary of attributes").items;
    for (std::size_t i = 0; i < items.size(); i += 2) as<std::string_view>(items[i], "the name of an attribute");
    if (!built->items.empty()) throw_format_error("a module whose attributes are set twice");
    charge(items.size() * sizeof(Index));
    built->items = items;
  }

  void memo_put(std::uint64_t key) {
    const Index value = top();
    if (memo_.insert_or_assign(key, value).second) charge(kMemoBytes);
  }

  void memo_get(std::uint64_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) throw_format_error("the memo has no value " + std::to_string(key));
    push(found->second);
  }

  // Function calls. They are not executed: each only records the value that it would return.
  void reduce() {
    using Callable = Pickle::Callable;
    using Kind = Pickle::Kind;
    const std::vector<Index>& arguments = as_items(pop(), Kind::kTuple, "a tuple of arguments").items;
    const auto function = as<Callable>(pop(), "a function to call");
    const auto [least, greatest] = kNumArguments[static_cast<std::size_t>(function)];
    if (arguments.size() < least || arguments.size() > greatest)
      throw_format_error("a call with " + std::to_string(arguments.size()) + " arguments");
    const auto copy_items = [&](Kind from, Kind to, const char* what) {
      Pickle::Container container{to, as_items(arguments[0], from, what).items};
      charge(container.items.size() * sizeof(Index));
      return container;
    };
    switch (function) {
      case Callable::kOrderedDict: return push_value(Pickle::Container{Kind::kOrderedDict, {}});
      case Callable::kCounter: return push_value(copy_items(Kind::kDict, Kind::kDict, "a dictionary of counts"));
      case Callable::kSet: return push_value(copy_items(Kind::kList, Kind::kSet, "a set's list"));
      case Callable::kSize: return push_value(copy_items(Kind::kTuple, Kind::kTuple, "a size's tuple"));
      case Callable::kEncode: return push_value(encode_latin1(arguments));
      case Callable::kTensor:
      case Callable::kTensorV2:
      case Callable::kTensorV3: return push_value(rebuild_tensor(function, arguments));
      case Callable::kParameter:
      case Callable::kParameterWithState: return push_value(rebuild_parameter(arguments));
    }
  }

  // Protocol 2 stores bytes as a string with one character per byte, whose code point is the byte's value.
  Pickle::Value encode_latin1(const std::vector<Index>& arguments) {
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

  // (storage, offset, size, stride[, requires_grad, hooks[, dtype][, metadata]])
  Pickle::Value rebuild_tensor(Pickle::Callable function, const std::vector<Index>& arguments) {
    const bool is_untyped = function == Pickle::Callable::kTensorV3;
    Pickle::Tensor tensor;
    tensor.storage = as<Pickle::StorageRef>(arguments[0], "a storage").index;
    tensor.offset = as<std::int64_t>(arguments[1], "an offset");
    tensor.sizes = as_sizes(arguments[2], "a tensor's size");
    tensor.strides = as_sizes(arguments[3], "a tensor's stride");
    if (arguments.size() > 4) tensor.requires_grad = as<bool>(arguments[4], "requires_grad");
    const Pickle::Storage& storage = pickle_.storages[tensor.storage];
    tensor.dtype = is_untyped ? as<const TorchDtype*>(arguments[6], "a dtype") : storage.dtype;
    if (!tensor.dtype || (is_untyped && storage.dtype))
      throw_format_error("a tensor whose storage has no dtype, or two");
    const std::size_t num_expected = is_untyped ? 7 : 6;
    if (arguments.size() > num_expected &&
        !std::holds_alternative<Pickle::None>(pickle_.values[arguments[num_expected]]) &&
        !as_items(arguments[num_expected], Pickle::Kind::kDict, "a tensor's metadata").items.empty())
      throw_format_error(
          "a lazily conjugated or negated tensor. Call resolve_conj() and resolve_neg() before saving it.");
    check_extent(tensor, is_untyped ? storage.num_elements / tensor.dtype->num_bytes : storage.num_elements);
    return add_tensor(std::move(tensor), "a tensor");
  }

  // (tensor, requires_grad, hooks[, attributes])
  Pickle::Value rebuild_parameter(const std::vector<Index>& arguments) {
    Pickle::Tensor tensor = pickle_.tensors[as<Pickle::TensorRef>(arguments[0], "a parameter's tensor").index];
    tensor.requires_grad = as<bool>(arguments[1], "requires_grad");
    return add_tensor(std::move(tensor), "a parameter");
  }

  Pickle::Value add_tensor(Pickle::Tensor tensor, const std::string& what) {
    if (tensor.requires_grad && !c10::isFloatingType(tensor.dtype->type) && !c10::isComplexType(tensor.dtype->type))
      throw_format_error(what + " of " + std::string(tensor.dtype->name) + " that requires a gradient");
    charge(sizeof(Pickle::Tensor) + (tensor.sizes.size() + tensor.strides.size()) * 2 * sizeof(std::int64_t));
    pickle_.tensors.push_back(std::move(tensor));
    return Pickle::TensorRef{static_cast<std::uint32_t>(pickle_.tensors.size() - 1)};
  }

  std::vector<std::int64_t> as_sizes(Index value, const char* what) const {
    const auto& tuple = as_items(value, Pickle::Kind::kTuple, what);
    if (tuple.items.size() > files::kMaxDimensions) throw_format_error("a tensor of more than 64 dimensions");
    std::vector<std::int64_t> numbers;
    for (const Index item : tuple.items) {
      numbers.push_back(as<std::int64_t>(item, what));
      if (numbers.back() < 0) throw_format_error(std::string(what) + " of " + std::to_string(numbers.back()));
    }
    return numbers;
  }

  // Checks that every element lies in the storage. An extent of 0 must not hide an overflow, because torch multiplies
  // the other extents for its strides.
  void check_extent(const Pickle::Tensor& tensor, std::uint64_t num_elements) const {
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

  template <typename T>
  const T& as(Index value, const char* what) const {
    const T* const found = std::get_if<T>(&pickle_.values[value]);
    if (!found) throw_format_error("expected " + std::string(what));
    return *found;
  }

  const Pickle::Container& as_items(Index value, Pickle::Kind kind, const char* what) const {
    const auto& container = as<Pickle::Container>(value, what);
    if (container.kind != kind) throw_format_error("expected " + std::string(what));
    return container;
  }

  const std::string_view bytes_;
  const std::string& file_;
  const std::uint64_t begin_;
  std::size_t position_ = 0;
  std::size_t opcode_offset_ = 0;  // offset of the current opcode
  std::uint64_t num_charged_bytes_ = 0;
  bool is_stopped_ = false;
  Pickle pickle_;
  std::vector<Index> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Index> memo_;
  std::unordered_map<std::string, std::uint32_t> storages_;  // by storage key
};

}  // namespace

Pickle parse_pickle(std::string_view bytes, const std::string& file, std::uint64_t begin) {
  Pickle pickle = Unpickler(bytes, file, begin).run();
  validate_pickle(pickle, file, begin);
  return pickle;
}

}  // namespace lockstep::checkpoint::inline torch_file
