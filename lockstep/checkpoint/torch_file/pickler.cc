#include "lockstep/checkpoint/torch_file/pickler.h"

#include <bit>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/torch_file/torch_dtype.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

class Pickler {
 public:
  explicit Pickler(const std::function<StoredTensor(const at::Tensor&)>& locate) : locate_(locate) {}

  std::string dump(const Value& value) {
    output_ = "\x80\x02";
    write(value, 1);
    output_ += '.';
    return std::move(output_);
  }

 private:
  [[noreturn]] static void throw_usage_error(const std::string& reason) {
    throw base::UsageError("cannot save " + reason);
  }

  void number(std::uint64_t value, std::size_t num_bytes) {
    for (std::size_t i = 0; i < num_bytes; ++i) output_ += static_cast<char>(value >> (8 * i));
  }
  void global(std::string_view module, std::string_view name) {
    ((output_ += 'c').append(module) += '\n').append(name) += '\n';
  }
  void ordered_dict() {
    global("collections", "OrderedDict");
    output_ += ")R";
  }

  void integer(std::int64_t value) {
    if (value >= 0 && value < 256) {
      output_ += 'K';
      number(static_cast<std::uint64_t>(value), 1);
    } else if (value == static_cast<std::int32_t>(value)) {
      output_ += 'J';
      number(static_cast<std::uint64_t>(value), 4);
    } else {
      output_ += "\x8a\x08";
      number(static_cast<std::uint64_t>(value), 8);
    }
  }

  void string(std::string_view value) {
    if (!base::is_utf8(value) || value.size() > files::kMaxPickleBytes)
      throw_usage_error("the string " + base::quoted(value, 80) + "; expected UTF-8 of at most 32 MiB");
    output_ += 'X';
    number(value.size(), 4);
    output_ += value;
  }

  void floating(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    output_ += 'G';
    number(__builtin_bswap64(bits), 8);
  }

  // Writes bytes as a string with one character per byte, whose code point is the byte's value. Python encodes it as
  // Latin-1.
  void bytes(const std::string& value) {
    std::string latin1;
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x80) {
        latin1 += c;
      } else {
        latin1 += static_cast<char>(0xc0 | byte >> 6);
        latin1 += static_cast<char>(0x80 | (byte & 0x3f));
      }
    }
    global("_codecs", "encode");
    string(latin1);
    string("latin1");
    output_ += "\x86R";
  }

  void numbers(const std::vector<std::int64_t>& values) {
    output_ += '(';
    for (const auto value : values) integer(value);
    output_ += 't';
  }

  void tensor(const at::Tensor& tensor) {
    const StoredTensor stored = locate_(tensor);
    const TorchDtype& dtype = *find_torch_dtype(tensor.scalar_type());
    const bool is_untyped = dtype.storage.empty();
    global("torch._utils", is_untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    output_ += "((";
    string("storage");
    is_untyped ? global("torch.storage", "UntypedStorage") : global("torch", dtype.storage);
    string(stored.storage);
    string("cpu");
    integer(static_cast<std::int64_t>(stored.num_elements * (is_untyped ? dtype.num_bytes : 1)));
    output_ += "tQ";
    integer(stored.offset);
    numbers(stored.sizes);
    numbers(stored.strides);
    output_ += tensor.requires_grad() ? "\x88" : "\x89";
    ordered_dict();
    if (is_untyped) global("torch", dtype.name);
    output_ += "tR";
  }

  void sequence(const Sequence& value, std::size_t depth) {
    if (value.kind == Sequence::Kind::kTuple) {
      output_ += '(';
      for (const Value& item : value.items) write(item, depth + 1);
      output_ += 't';
      return;
    }
    if (value.kind == Sequence::Kind::kSet) global("__builtin__", "set");
    output_ += "](";
    for (const Value& item : value.items) write(item, depth + 1);
    output_ += 'e';
    if (value.kind == Sequence::Kind::kSet) output_ += "\x85R";
  }

  void dict(const Dict& value, std::size_t depth) {
    std::set<std::string> names;
    std::set<std::int64_t> numbers;
    if (value.ordered)
      ordered_dict();
    else
      output_ += '}';
    output_ += '(';
    for (const auto& item : value.items) {
      const auto* const name = item.key.as<std::string>();
      const auto* const integer = item.key.as<std::int64_t>();
      if (item.key.as<Sequence>() || item.key.as<Dict>() || item.key.as<at::Tensor>())
        throw_usage_error("a dictionary whose key is " + std::string(kind_of(item.key)) +
                          "; expected a string, a number, a bool, bytes or None");
      if ((name && !names.insert(*name).second) || (integer && !numbers.insert(*integer).second))
        throw_usage_error("a dictionary that has the key " +
                          (name ? base::quoted(*name, 80) : std::to_string(*integer)) + " twice");
      write(item.key, depth + 1);
      write(item.value, depth + 1);
    }
    output_ += 'u';
  }

  void write(const Value& value, std::size_t depth) {
    if (depth > files::kMaxTreeDepth) throw_usage_error("values that are nested deeper than the limit of 64 levels");
    if (const auto* const it = value.as<bool>()) output_ += *it ? "\x88" : "\x89";
    if (const auto* const it = value.as<std::int64_t>()) integer(*it);
    if (const auto* const it = value.as<double>()) floating(*it);
    if (const auto* const it = value.as<std::string>()) string(*it);
    if (const auto* const it = value.as<ByteString>()) bytes(it->bytes);
    if (const auto* const it = value.as<Sequence>()) sequence(*it, depth);
    if (const auto* const it = value.as<Dict>()) dict(*it, depth);
    if (const auto* const it = value.as<at::Tensor>()) tensor(*it);
    if (value.as<None>()) output_ += 'N';
  }

  const std::function<StoredTensor(const at::Tensor&)>& locate_;
  std::string output_;
};

}  // namespace

std::string to_pickle(const Value& value, const std::function<StoredTensor(const at::Tensor&)>& locate) {
  return Pickler(locate).dump(value);
}

}  // namespace lockstep::checkpoint::inline torch_file
