#include "lockstep/checkpoint/torch_file/unpickler.h"

#include <array>
#include <bit>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint {
namespace {

// Of values that take no memory of their own: about what a container's item costs, with the room that vectors keep.
constexpr std::size_t kPushBytes = 2 * sizeof(Pickle::Index);
constexpr std::size_t kMemoBytes = 48;  // of std::unordered_map
constexpr std::size_t kValueBytes = 2 * (sizeof(Pickle::Value) + sizeof(std::uint32_t));

struct Global {
  std::string_view module, name;
  Pickle::Function function;
};
constexpr std::array kGlobals = {
    Global{"collections", "OrderedDict", Pickle::Function::kOrderedDict},
    Global{"collections", "Counter", Pickle::Function::kCounter},
    Global{"__builtin__", "set", Pickle::Function::kSet},
    Global{"builtins", "set", Pickle::Function::kSet},
    Global{"torch", "Size", Pickle::Function::kSize},
    Global{"_codecs", "encode", Pickle::Function::kEncode},
    Global{"torch._utils", "_rebuild_tensor", Pickle::Function::kTensor},
    Global{"torch._utils", "_rebuild_tensor_v2", Pickle::Function::kTensorV2},
    Global{"torch._utils", "_rebuild_tensor_v3", Pickle::Function::kTensorV3},
    Global{"torch._utils", "_rebuild_parameter", Pickle::Function::kParameter},
    Global{"torch._utils", "_rebuild_parameter_with_state", Pickle::Function::kParameterWithState},
};

}  // namespace

void PickleMachine::refuse(const std::string& reason) const {
  throw base::FormatError(file_ + ":" + std::to_string(begin_ + here_) + ": " + reason);
}

void PickleMachine::refuse_without(const char* what) const { refuse(std::string(what) + " is expected"); }

void PickleMachine::spend(std::size_t num_bytes) {
  spent_ += num_bytes;
  if (spent_ > kMaxTreeBytes) refuse("the pickle makes more than fits into 128 MiB");
}

std::string_view PickleMachine::take(std::size_t num_bytes) {
  if (num_bytes > bytes_.size() - at_)
    refuse("the pickle ends here; " + std::to_string(num_bytes) + " more bytes are expected");
  const auto taken = bytes_.substr(at_, num_bytes);
  at_ += num_bytes;
  return taken;
}

std::string_view PickleMachine::take_line() {
  const auto end = bytes_.substr(at_, kMaxNameBytes).find('\n');
  if (end == std::string_view::npos) refuse("a name of more than 1024 bytes");
  const auto line = take(end);
  ++at_;
  return line;
}

std::uint64_t PickleMachine::take_number(std::size_t num_bytes) {
  const auto text = take(num_bytes);
  std::uint64_t number = 0;
  std::memcpy(&number, text.data(), num_bytes);
  return number;
}

void PickleMachine::push(Index value) {
  spend(kPushBytes);
  stack_.push_back(value);
}

void PickleMachine::make(Pickle::Value value) {
  spend(kValueBytes);
  pickle_.values.push_back(std::move(value));
  pickle_.offsets.push_back(static_cast<std::uint32_t>(here_));
  push(static_cast<Index>(pickle_.values.size() - 1));
}

PickleMachine::Index PickleMachine::top() const {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) refuse("a value is expected on the stack");
  return stack_.back();
}

PickleMachine::Index PickleMachine::pop() {
  const Index value = top();
  stack_.pop_back();
  return value;
}

std::size_t PickleMachine::take_mark() {
  if (marks_.empty()) refuse("a mark is expected on the stack");
  const std::size_t mark = marks_.back();
  marks_.pop_back();
  return mark;
}

void PickleMachine::make_number(std::size_t num_bytes) {
  const std::uint64_t number = take_number(num_bytes);
  make(num_bytes == 4 ? std::int64_t{static_cast<std::int32_t>(number)} : static_cast<std::int64_t>(number));
}

void PickleMachine::make_long() {
  const std::size_t num_bytes = take_number(1);
  if (num_bytes > 8) refuse("an integer of more than 64 bits");
  std::uint64_t number = take_number(num_bytes);
  if (num_bytes > 0 && num_bytes < 8 && (number >> (8 * num_bytes - 1)) != 0)
    number |= ~std::uint64_t{0} << (8 * num_bytes);
  make(static_cast<std::int64_t>(number));
}

void PickleMachine::make_double() {
  std::uint64_t number = take_number(8);  // big-endian
  number = __builtin_bswap64(number);
  make(std::bit_cast<double>(number));
}

void PickleMachine::make_string(std::size_t num_bytes) {
  const auto text = take(num_bytes);
  if (!base::is_utf8(text)) refuse("a string that is not UTF-8");
  make(text);
}

void PickleMachine::make_tuple(std::size_t num_items) {
  const std::size_t least = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() - least < num_items) refuse("a tuple of " + std::to_string(num_items) + " is made of fewer values");
  const auto first = stack_.end() - static_cast<std::ptrdiff_t>(num_items);
  Pickle::Container tuple{Pickle::Kind::kTuple, {first, stack_.end()}};
  spend(num_items * sizeof(Index));
  stack_.erase(first, stack_.end());
  make(std::move(tuple));
}

// What lies on the stack from `first` on goes into the list or dictionary below.
void PickleMachine::fill(bool is_dict, std::size_t first) {
  const std::size_t least = marks_.empty() ? 0 : marks_.back();
  if (first <= least || first > stack_.size()) refuse("a list or a dictionary is expected on the stack");
  auto* const container = std::get_if<Pickle::Container>(&pickle_.values[stack_[first - 1]]);
  using Kind = Pickle::Kind;
  const bool fits = container && (is_dict ? container->kind == Kind::kDict || container->kind == Kind::kOrderedDict
                                          : container->kind == Kind::kList);
  if (!fits || (is_dict && (stack_.size() - first) % 2 != 0))
    refuse(is_dict ? "a dictionary and pairs are expected on the stack" : "a list is expected on the stack");
  spend((stack_.size() - first) * kPushBytes);
  container->items.insert(container->items.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
  stack_.resize(first);
}

void PickleMachine::find_global() {
  const auto module = take_line(), name = take_line();
  for (const Global& global : kGlobals)
    if (global.module == module && global.name == name) return make(global.function);
  if (module == "torch") {
    if (const TorchDtype* const dtype = find_torch_storage(name)) return make(Pickle::StorageType{dtype});
    if (const TorchDtype* const dtype = find_torch_dtype(name)) return make(dtype);
  }
  if (name == "UntypedStorage" && (module == "torch.storage" || module == "torch"))
    return make(Pickle::StorageType{nullptr});
  refuse("the global " + base::quoted(std::string(module) + "." + std::string(name), 120) +
         "; allowed are those of a state_dict (tensors, parameters, dictionaries, lists, sets, strings, bytes and "
         "numbers), of dtypes " +
         torch_dtype_names());
}

void PickleMachine::find_storage() {
  const auto& id = items(pop(), Pickle::Kind::kTuple, "a tuple that names a storage");
  if (id.items.size() != 5 || as<std::string_view>(id.items[0], "the word \"storage\"") != "storage")
    refuse("(\"storage\", type, key, place, number) is expected");
  const auto key = std::string(as<std::string_view>(id.items[2], "a storage's key"));
  const auto number = as<std::int64_t>(id.items[4], "a storage's number of elements");
  const auto* const dtype = as<Pickle::StorageType>(id.items[1], "a storage's type").dtype;
  if (key.empty() || key.size() > 64 || key.find('/') != std::string::npos || number < 0 || number > INT64_MAX / 16)
    refuse("the storage " + base::quoted(key, 80) + " of " + std::to_string(number) + " elements");
  const auto [found, is_new] = storages_.emplace(key, static_cast<std::uint32_t>(pickle_.storages.size()));
  if (is_new) {
    spend(sizeof(Pickle::Storage) + kMemoBytes + 2 * key.size());
    pickle_.storages.push_back({key, dtype, static_cast<std::uint64_t>(number)});
  }
  const auto& storage = pickle_.storages[found->second];
  if (storage.dtype != dtype || storage.num_elements != static_cast<std::uint64_t>(number))
    refuse("the storage " + base::quoted(key, 80) + " is there twice, with another type or size");
  make(Pickle::StorageAt{found->second});
}

// Attributes of an OrderedDict: a state_dict has "_metadata", which are the versions of Python's modules.
void PickleMachine::build() {
  pop();
  const auto* const built = std::get_if<Pickle::Container>(&pickle_.values[top()]);
  if (!built || built->kind != Pickle::Kind::kOrderedDict) refuse("attributes of something that is no OrderedDict");
}

void PickleMachine::remember(std::uint64_t key) {
  const Index value = top();
  if (memo_.insert_or_assign(key, value).second) spend(kMemoBytes);
}

void PickleMachine::recall(std::uint64_t key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) refuse("the value number " + std::to_string(key) + " was not kept");
  push(found->second);
}

const Pickle::Container& PickleMachine::items(Index value, Pickle::Kind kind, const char* what) const {
  const auto& container = as<Pickle::Container>(value, what);
  if (container.kind != kind) refuse_without(what);
  return container;
}

void PickleMachine::step(unsigned char opcode) {
  using Kind = Pickle::Kind;
  switch (opcode) {
    case 0x80: return take_number(1) == 2 ? void() : refuse("a protocol other than 2, which torch.save() has");
    case '.': stopped_ = true; return;
    case '(': marks_.push_back(stack_.size()); return spend(2 * sizeof(std::size_t));
    case 'N': return make(Pickle::None{});
    case 0x88: return make(true);
    case 0x89: return make(false);
    case 'K': return make_number(1);
    case 'M': return make_number(2);
    case 'J': return make_number(4);
    case 0x8a: return make_long();
    case 'G': return make_double();
    case 'X': return make_string(take_number(4));
    case 'U': return make_string(take_number(1));
    case ')': return make(Pickle::Container{Kind::kTuple, {}});
    case ']': return make(Pickle::Container{Kind::kList, {}});
    case '}': return make(Pickle::Container{Kind::kDict, {}});
    case 0x8f: return make(Pickle::Container{Kind::kSet, {}});
    case 0x85: return make_tuple(1);
    case 0x86: return make_tuple(2);
    case 0x87: return make_tuple(3);
    case 't': return make_tuple(stack_.size() - take_mark());
    case 'a': return fill(false, stack_.size() - 1);
    case 's': return fill(true, stack_.size() - 2);
    case 'e': return fill(false, take_mark());
    case 'u': return fill(true, take_mark());
    case 'c': return find_global();
    case 'R': return call();
    case 'b': return build();
    case 'Q': return find_storage();
    case 'q': return remember(take_number(1));
    case 'r': return remember(take_number(4));
    case 'h': return recall(take_number(1));
    case 'j': return recall(take_number(4));
    default: refuse("the opcode " + std::to_string(opcode) + ", which no file of torch.save() has");
  }
}

Pickle PickleMachine::run() {
  if (bytes_.size() > kMaxPickleBytes)
    refuse("a pickle of " + std::to_string(bytes_.size()) + " bytes; allowed are 32 MiB");
  while (!stopped_) {
    here_ = at_;
    step(static_cast<unsigned char>(take(1)[0]));
  }
  if (stack_.size() != 1 || !marks_.empty()) refuse("one value is expected on the stack in the end");
  pickle_.root = stack_.back();
  return std::move(pickle_);
}

Pickle parse_pickle(std::string_view bytes, const std::string& file, std::uint64_t begin) {
  Pickle pickle = PickleMachine(bytes, file, begin).run();
  check_tree(pickle, file, begin);
  return pickle;
}

}  // namespace lockstep::checkpoint
