#include "lockstep/checkpoint/safetensors/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/embedded_hash.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint::inline safetensors {
namespace {

using c10::ScalarType;

constexpr std::array kDtypes = {
    SafetensorsDtype{"F64", ScalarType::Double, 8},
    SafetensorsDtype{"F32", ScalarType::Float, 4},
    SafetensorsDtype{"F16", ScalarType::Half, 2},
    SafetensorsDtype{"BF16", ScalarType::BFloat16, 2},
    SafetensorsDtype{"I64", ScalarType::Long, 8},
    SafetensorsDtype{"I32", ScalarType::Int, 4},
    SafetensorsDtype{"I16", ScalarType::Short, 2},
    SafetensorsDtype{"I8", ScalarType::Char, 1},
    SafetensorsDtype{"U8", ScalarType::Byte, 1},
    SafetensorsDtype{"BOOL", ScalarType::Bool, 1},
    SafetensorsDtype{"U64", ScalarType::UInt64, 8},
    SafetensorsDtype{"U32", ScalarType::UInt32, 4},
    SafetensorsDtype{"U16", ScalarType::UInt16, 2},
    SafetensorsDtype{"F8_E4M3", ScalarType::Float8_e4m3fn, 1},
    SafetensorsDtype{"F8_E5M2", ScalarType::Float8_e5m2, 1},
    SafetensorsDtype{"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz, 1},
    SafetensorsDtype{"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz, 1},
    SafetensorsDtype{"F8_E8M0", ScalarType::Float8_e8m0fnu, 1},
    SafetensorsDtype{"C64", ScalarType::ComplexFloat, 8},
};

// The beginning of a header with hashes, and the keys of the tensors' hashes.
constexpr std::string_view kBegin = "{\"__metadata__\":{\"lockstep.header\":\"";
constexpr std::string_view kTensors = "lockstep.tensors.";
constexpr std::size_t kHashesPerKey = 16384;  // half of kMaxTokenBytes

template <typename Predicate>
const SafetensorsDtype* find(Predicate is_it) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), is_it);
  return found == kDtypes.end() ? nullptr : &*found;
}

using json = nlohmann::json;

// `at` is an offset in the header's text.
[[noreturn]] void throw_format_error(const std::string& file, std::uint64_t at, const std::string& reason) {
  throw base::FormatError(file + ":" + std::to_string(kHeaderOffset + at) + ": " + reason);
}

// Rejects long tokens and deep nesting, for which the JSON parser would allocate memory before the handler sees them.
void check_token_lengths(std::string_view text, const std::string& file) {
  int depth = 0;
  bool in_string = false;
  std::size_t token_begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (i - token_begin > files::kMaxTokenBytes)
      throw_format_error(file, token_begin, "a string or number is longer than 1 MiB");
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth > files::kMaxDepth) throw_format_error(file, i, "nested deeper than the limit of 8 levels");
    if (c == '"' || c == ',' || c == ':' || c == ' ' || c == '{' || c == '}' || c == '[' || c == ']') token_begin = i;
  }
}

// Counts the characters that the parser has read, because nlohmann's events have no position.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    ++at;
    ++*count;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at == other.at; }
  bool operator!=(const CountingIterator& other) const { return at != other.at; }

  const char* at;
  std::uint64_t* count;
};

// Handles the events of nlohmann's SAX interface. The expected structure is an object of objects, each a tensor or the
// metadata.
class HeaderHandler {
 public:
  HeaderHandler(const std::string& file, const std::uint64_t& at, SafetensorsHeader& header)
      : file_(file), position_(at), header_(header) {}

  bool start_object(std::size_t) {
    if (level_ == Level::kTop) return enter(Level::kRoot);
    if (level_ != Level::kRoot) fail("found an object" + expected());
    if (in_metadata_) return enter(Level::kMetadata);
    fields_ = {};
    return enter(Level::kTensor);
  }

  bool key(std::string& name) {
    if (name.size() > files::kMaxNameBytes)
      fail("a name has " + std::to_string(name.size()) + " bytes; expected at most " +
           std::to_string(files::kMaxNameBytes));
    // The parser also checks UTF-8, but this rule must not depend on the library.
    if (!base::is_utf8(name)) fail("a name is not UTF-8");
    key_ = name;
    if (level_ == Level::kRoot) begin_entry();
    if (level_ == Level::kMetadata && header_.metadata.contains(key_)) throw_duplicate_key();
    return true;
  }

  bool string(std::string& value) {
    if (level_ == Level::kMetadata) {
      charge(key_.size() + value.size() + kEntryBytes);
      header_.metadata.emplace(key_, value);
      return true;
    }
    if (level_ != Level::kTensor || key_ != "dtype") fail("found a string" + expected());
    if (fields_.dtype) throw_duplicate_key();
    fields_.dtype = find_dtype(value);
    if (!fields_.dtype)
      fail("dtype of tensor " + base::quoted(name_, 80) + " is " + base::quoted(value, 80) + "; expected one of " +
           dtype_names());
    return true;
  }

  bool start_array(std::size_t) {
    if (level_ != Level::kTensor || (key_ != "shape" && key_ != "data_offsets")) fail("found a list" + expected());
    auto& list = key_ == "shape" ? fields_.shape : fields_.offsets;
    if (list) throw_duplicate_key();
    list.emplace();
    return enter(Level::kList);
  }

  bool number_unsigned(std::uint64_t value) {
    if (level_ != Level::kList) fail("found a number" + expected());
    const bool is_shape = key_ == "shape";
    auto& list = is_shape ? *fields_.shape : *fields_.offsets;
    if (list.size() >= (is_shape ? files::kMaxDimensions : 2))
      fail(key_ + " of tensor " + base::quoted(name_, 80) + " has more than " +
           (is_shape ? std::to_string(files::kMaxDimensions) : std::string("2")) + " entries");
    if (value > INT64_MAX) fail("found the number " + std::to_string(value) + "; expected at most 2^63 - 1");
    list.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool end_array() { return enter(Level::kTensor); }

  bool end_object() {
    if (level_ == Level::kRoot) return enter(Level::kEnd);
    if (level_ == Level::kTensor) end_tensor();
    return enter(Level::kRoot);
  }

  bool null() { fail("found null" + expected()); }
  bool boolean(bool) { fail("found a boolean" + expected()); }
  bool number_integer(std::int64_t value) { fail("found the number " + std::to_string(value) + expected()); }
  bool number_float(double, const std::string& text) {
    fail("found the number " + base::quoted(text, 40) + expected());
  }
  bool binary(json::binary_t&) { fail("found bytes" + expected()); }
  bool parse_error(std::size_t, const std::string& token, const json::exception&) {
    fail("invalid JSON: the parser stopped after " + base::quoted(token, 80));
  }

 private:
  enum class Level { kTop, kRoot, kTensor, kMetadata, kList, kEnd };
  struct TensorFields {
    const SafetensorsDtype* dtype = nullptr;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::vector<std::int64_t>> offsets;
  };

  // The size of a map node, including the allocator's overhead.
  static constexpr std::size_t kEntryBytes = 192;

  [[noreturn]] void fail(const std::string& reason) const { throw_format_error(file_, position_, reason); }

  bool enter(Level level) {
    level_ = level;
    return true;
  }

  std::string expected() const {
    switch (level_) {
      case Level::kTop: return "; expected an object, the header";
      case Level::kRoot: return "; expected an object for " + base::quoted(name_, 80);
      case Level::kMetadata: return "; expected a string for metadata " + base::quoted(key_, 80);
      case Level::kList: return "; expected an integer of 0 or more";
      case Level::kTensor:
      case Level::kEnd: break;
    }
    return " in the field " + base::quoted(key_, 80) + " of tensor " + base::quoted(name_, 80) +
           "; expected \"dtype\" (a string), \"shape\" and \"data_offsets\" (lists of integers)";
  }

  [[noreturn]] void throw_duplicate_key() const { fail("duplicate key " + base::quoted(key_, 80)); }

  void begin_entry() {
    name_ = key_;
    in_metadata_ = name_ == "__metadata__";
    if (in_metadata_ ? seen_metadata_ : header_.tensors.contains(name_)) throw_duplicate_key();
    seen_metadata_ = seen_metadata_ || in_metadata_;
  }

  // Limits memory, because parsing a header of 16 MiB could need ten times as much.
  void charge(std::size_t num_bytes) {
    num_charged_bytes_ += num_bytes;
    if (num_charged_bytes_ > files::kMaxParsedBytes)
      fail("the header describes more than the limit of 12 MiB (about 60,000 tensors)");
  }

  void end_tensor() {
    const std::string tensor = "tensor " + base::quoted(name_, 80);
    if (!fields_.dtype || !fields_.shape || !fields_.offsets || fields_.offsets->size() != 2)
      fail(tensor + " requires \"dtype\", \"shape\" and \"data_offsets\" (two integers)");
    const auto begin = static_cast<std::uint64_t>((*fields_.offsets)[0]);
    const auto end = static_cast<std::uint64_t>((*fields_.offsets)[1]);
    if (begin > end)
      fail(tensor + " ends at " + std::to_string(end) + ", before it begins at " + std::to_string(begin));
    // An extent of 0 must not hide an overflow, because torch multiplies the other extents for its strides.
    std::uint64_t num_bytes = fields_.dtype->num_bytes;
    bool empty = false, overflow = false;
    for (const auto extent : *fields_.shape) {
      empty = empty || extent == 0;
      const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1));
      overflow = overflow || __builtin_mul_overflow(num_bytes, factor, &num_bytes);
    }
    if (overflow || num_bytes > INT64_MAX) fail("the shape of " + tensor + " has more than 2^63 bytes");
    if (empty) num_bytes = 0;
    if (num_bytes != end - begin)
      fail(tensor + " has " + std::to_string(end - begin) + " bytes; expected " + std::to_string(num_bytes) +
           " for its shape and dtype");
    fields_.shape->shrink_to_fit();
    charge(name_.size() + fields_.shape->size() * sizeof(std::int64_t) + kEntryBytes);
    header_.tensors.emplace(name_, TensorEntry{fields_.dtype, std::move(*fields_.shape), begin, end});
  }

  const std::string& file_;
  const std::uint64_t& position_;
  SafetensorsHeader& header_;
  Level level_ = Level::kTop;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string name_;  // key of the current entry of the root object
  std::string key_;   // the last key
  TensorFields fields_;
  std::size_t num_charged_bytes_ = 0;
};

// Checks that every byte of the data belongs to exactly one tensor.
void check_layout(const SafetensorsHeader& header, std::uint64_t num_data_bytes, const std::string& file,
                  std::uint64_t at) {
  std::vector<const std::pair<const std::string, TensorEntry>*> order;
  order.reserve(header.tensors.size());
  for (const auto& entry : header.tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t covered = 0;
  for (const auto* entry : order) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin != covered)
      throw_format_error(
          file, at + covered,
          "tensor " + base::quoted(name, 80) + " begins at byte " + std::to_string(tensor.begin) + " of the data, " +
              (tensor.begin < covered ? "inside the previous tensor, which ends at " : "after a gap from ") +
              std::to_string(covered));
    if (tensor.end > num_data_bytes)
      throw_format_error(file, at + num_data_bytes,
                         "tensor " + base::quoted(name, 80) + " ends at byte " + std::to_string(tensor.end) +
                             " of the data; the file has " + std::to_string(num_data_bytes));
    covered = tensor.end;
  }
  if (covered != num_data_bytes)
    throw_format_error(file, at + covered,
                       std::to_string(num_data_bytes - covered) + " bytes after the last tensor belong to no tensor");
}

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* find_dtype(ScalarType type) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.type == type; });
}

std::string dtype_names() {
  return base::joined(kDtypes, ", ", [](const SafetensorsDtype& dtype) { return dtype.name; });
}

SafetensorsHeader parse_header(std::string_view text, std::uint64_t num_data_bytes, const std::string& file) {
  if (text.empty() || text.front() != '{') throw_format_error(file, 0, "the header does not begin with '{'");
  // White space other than spaces is legal JSON but not legal padding.
  const std::size_t last = text.find_last_not_of(' ');
  if (text[last] != '}') throw_format_error(file, last, "the header does not end with '}' and spaces");
  check_token_lengths(text, file);
  SafetensorsHeader header;
  std::uint64_t at = 0;
  HeaderHandler handler(file, at, header);
  json::sax_parse(CountingIterator{text.data(), &at}, CountingIterator{text.data() + text.size(), &at}, &handler);
  check_layout(header, num_data_bytes, file, text.size());
  return header;
}

std::string header_prefix(const std::vector<std::string>& hashes) {
  std::string text = std::string(kBegin) + files::kHashPlaceholder + "\"";
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i % kHashesPerKey == 0)
      text +=
          std::string(i == 0 ? "" : "\"") + ",\"" + std::string(kTensors) + std::to_string(i / kHashesPerKey) + "\":\"";
    text += hashes[i];
  }
  return text + (hashes.empty() ? ",\"" + std::string(kTensors) + "0\":\"\"" : "\"");
}

void embed_header_hash(std::string& text) { files::embed_hash(text, kBegin.size()); }

TensorHashes::TensorHashes(std::string_view text, SafetensorsHeader& header, const std::string& file) {
  std::map<std::string, std::string> own_metadata;
  for (auto at = header.metadata.lower_bound(std::string(kMetadataPrefix));
       at != header.metadata.end() && at->first.starts_with(kMetadataPrefix);)
    own_metadata.insert(header.metadata.extract(at++));
  has_hashes_ = !own_metadata.empty();
  if (!has_hashes_) return;
  const auto throw_format_error = [&](const std::string& reason) {
    throw base::FormatError(file + ":" + std::to_string(kHeaderOffset) + ": " + reason);
  };
  if (!text.starts_with(kBegin) || !files::is_hash_valid(text, kBegin.size()))
    throw_format_error(
        "the header is damaged: its contents do not match its hash (or another program copied the metadata \"" +
        std::string(kMetadataPrefix) + "...\" into its own file)");
  header_hash_ = text.substr(kBegin.size(), files::kHashDigits);
  for (std::size_t i = 0; own_metadata.contains(std::string(kTensors) + std::to_string(i)); ++i)
    hashes_ += own_metadata[std::string(kTensors) + std::to_string(i)];
  for (const auto& [name, entry] : header.tensors) byte_ranges_.emplace_back(entry.begin, entry.end);
  std::sort(byte_ranges_.begin(), byte_ranges_.end());
  if (hashes_.size() != byte_ranges_.size() * files::kHashDigits)
    throw_format_error("the header has " + std::to_string(hashes_.size() / files::kHashDigits) + " hashes for its " +
                       std::to_string(byte_ranges_.size()) + " tensors");
}

std::string_view TensorHashes::hash_of(const TensorEntry& entry) const {
  const auto found = std::lower_bound(byte_ranges_.begin(), byte_ranges_.end(), ByteRange(entry.begin, entry.end));
  return std::string_view(hashes_).substr(static_cast<std::size_t>(found - byte_ranges_.begin()) * files::kHashDigits,
                                          files::kHashDigits);
}

}  // namespace lockstep::checkpoint::inline safetensors
