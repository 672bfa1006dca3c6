#include "lockstep/checkpoint/safetensors/safetensors_header.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint {
namespace {

using Json = nlohmann::json;

class Refuser {
 public:
  explicit Refuser(const std::string& file) : file_(file) {}
  // `at`: in the header's text.
  [[noreturn]] void operator()(std::uint64_t at, const std::string& reason) const {
    throw base::FormatError(file_ + ":" + std::to_string(kHeaderOffset + at) + ": " + reason);
  }

 private:
  const std::string& file_;
};

// What the JSON parser would allocate for before anybody could object: long tokens, deep nesting.
void check_tokens(std::string_view text, const Refuser& refuse) {
  int depth = 0;
  bool in_string = false;
  std::size_t token_begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (i - token_begin > kMaxTokenBytes) refuse(token_begin, "a string or number of more than 1 MiB");
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth > kMaxDepth) refuse(i, "nested deeper than the allowed 8 levels");
    if (c == '"' || c == ',' || c == ':' || c == ' ' || c == '{' || c == '}' || c == '[' || c == ']') token_begin = i;
  }
}

// Lets the handler know how far the parser has read: nlohmann's events carry no position.
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

// The events of nlohmann's SAX interface, taken as a grammar: an object of objects, which are tensors or the metadata.
class Handler {
 public:
  Handler(const Refuser& refuse, const std::uint64_t& at, SafetensorsHeader& header)
      : refuse_(refuse), at_(at), header_(header) {}

  bool start_object(std::size_t) {
    if (place_ == Place::kTop) return go(Place::kRoot);
    if (place_ != Place::kRoot) refuse_(at_, "an object where " + expected());
    if (in_metadata_) return go(Place::kMetadata);
    fields_ = {};
    return go(Place::kTensor);
  }

  bool key(std::string& name) {
    if (name.size() > kMaxNameBytes)
      refuse_(at_, "a name of " + std::to_string(name.size()) + " bytes; allowed is at most " +
                       std::to_string(kMaxNameBytes));
    // The parser has looked for UTF-8 already; this is the rule that we promise, not what a library happens to do.
    if (!base::is_utf8(name)) refuse_(at_, "a name that is not UTF-8");
    key_ = name;
    if (place_ == Place::kRoot) begin_entry();
    if (place_ == Place::kMetadata && header_.metadata.contains(key_)) refuse_twice();
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      spend(key_.size() + value.size() + kEntryBytes);
      header_.metadata.emplace(key_, value);
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") refuse_(at_, "a string where " + expected());
    if (fields_.dtype) refuse_twice();
    fields_.dtype = find_dtype(value);
    if (!fields_.dtype)
      refuse_(at_, "dtype of tensor " + base::quoted(name_, 80) + " is " + base::quoted(value, 80) + "; allowed is " +
                       dtype_names());
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::kTensor || (key_ != "shape" && key_ != "data_offsets"))
      refuse_(at_, "a list where " + expected());
    auto& list = key_ == "shape" ? fields_.shape : fields_.offsets;
    if (list) refuse_twice();
    list.emplace();
    return go(Place::kList);
  }

  bool number_unsigned(std::uint64_t value) {
    if (place_ != Place::kList) refuse_(at_, "a number where " + expected());
    const bool is_shape = key_ == "shape";
    auto& list = is_shape ? *fields_.shape : *fields_.offsets;
    if (list.size() >= (is_shape ? kMaxDimensions : 2))
      refuse_(at_, key_ + " of tensor " + base::quoted(name_, 80) + " has more than " +
                       (is_shape ? std::to_string(kMaxDimensions) : std::string("2")) + " entries");
    if (value > INT64_MAX) refuse_(at_, "the number " + std::to_string(value) + "; allowed is at most 2^63 - 1");
    list.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool end_array() { return go(Place::kTensor); }

  bool end_object() {
    if (place_ == Place::kRoot) return go(Place::kEnd);
    if (place_ == Place::kTensor) end_tensor();
    return go(Place::kRoot);
  }

  bool null() { refuse_(at_, "null where " + expected()); }
  bool boolean(bool) { refuse_(at_, "a boolean where " + expected()); }
  bool number_integer(std::int64_t value) {
    refuse_(at_, "the number " + std::to_string(value) + " where " + expected());
  }
  bool number_float(double, const std::string& text) {
    refuse_(at_, "the number " + base::quoted(text, 40) + " where " + expected());
  }
  bool binary(Json::binary_t&) { refuse_(at_, "bytes where " + expected()); }
  bool parse_error(std::size_t, const std::string& token, const Json::exception&) {
    refuse_(at_, "not JSON: the parser stopped after " + base::quoted(token, 80));
  }

 private:
  enum class Place { kTop, kRoot, kTensor, kMetadata, kList, kEnd };
  struct Fields {
    const Dtype* dtype = nullptr;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::vector<std::int64_t>> offsets;
  };

  // Nodes of the maps, with what the allocator adds.
  static constexpr std::size_t kEntryBytes = 192;

  bool go(Place place) {
    place_ = place;
    return true;
  }

  std::string expected() const {
    switch (place_) {
      case Place::kTop: return "the header, an object, is expected";
      case Place::kRoot: return "the object of " + base::quoted(name_, 80) + " is expected";
      case Place::kMetadata: return "the string of metadata " + base::quoted(key_, 80) + " is expected";
      case Place::kList: return "an integer of 0 or more is expected";
      default: break;
    }
    return "tensor " + base::quoted(name_, 80) + " has the field " + base::quoted(key_, 80) +
           "; expected are \"dtype\" (a string), \"shape\" and \"data_offsets\" (lists of integers)";
  }

  [[noreturn]] void refuse_twice() const { refuse_(at_, "the key " + base::quoted(key_, 80) + " is there twice"); }

  void begin_entry() {
    name_ = key_;
    in_metadata_ = name_ == "__metadata__";
    if (in_metadata_ ? seen_metadata_ : header_.tensors.contains(name_)) refuse_twice();
    seen_metadata_ = seen_metadata_ || in_metadata_;
  }

  // A header of 16 MiB could describe ten times as much.
  void spend(std::size_t num_bytes) {
    spent_ += num_bytes;
    if (spent_ > kMaxParsedBytes)
      refuse_(at_, "the header describes more than fits into 12 MiB (about 60,000 tensors)");
  }

  void end_tensor() {
    const std::string tensor = "tensor " + base::quoted(name_, 80);
    if (!fields_.dtype || !fields_.shape || !fields_.offsets || fields_.offsets->size() != 2)
      refuse_(at_, tensor + " needs \"dtype\", \"shape\" and \"data_offsets\" (two integers)");
    const auto begin = static_cast<std::uint64_t>((*fields_.offsets)[0]);
    const auto end = static_cast<std::uint64_t>((*fields_.offsets)[1]);
    if (begin > end)
      refuse_(at_, tensor + " ends at " + std::to_string(end) + ", before it begins at " + std::to_string(begin));
    // Extents of 0 do not hide an overflow: torch multiplies the others for its strides.
    std::uint64_t num_bytes = fields_.dtype->num_bytes;
    bool empty = false, overflow = false;
    for (const auto extent : *fields_.shape) {
      empty = empty || extent == 0;
      const auto factor = static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 1));
      overflow = overflow || __builtin_mul_overflow(num_bytes, factor, &num_bytes);
    }
    if (overflow || num_bytes > INT64_MAX) refuse_(at_, "the shape of " + tensor + " has more than 2^63 bytes");
    if (empty) num_bytes = 0;
    if (num_bytes != end - begin)
      refuse_(at_, tensor + " has " + std::to_string(end - begin) + " bytes; its shape and dtype need " +
                       std::to_string(num_bytes));
    fields_.shape->shrink_to_fit();
    spend(name_.size() + fields_.shape->size() * sizeof(std::int64_t) + kEntryBytes);
    header_.tensors.emplace(name_, TensorEntry{fields_.dtype, std::move(*fields_.shape), begin, end});
  }

  const Refuser& refuse_;
  const std::uint64_t& at_;
  SafetensorsHeader& header_;
  Place place_ = Place::kTop;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string name_;  // key of the root's entry
  std::string key_;   // the last key
  Fields fields_;
  std::size_t spent_ = 0;
};

// Every byte of the data belongs to exactly one tensor.
void check_layout(const SafetensorsHeader& header, std::uint64_t num_data_bytes, const Refuser& refuse,
                  std::uint64_t at) {
  std::vector<const std::pair<const std::string, TensorEntry>*> order;
  order.reserve(header.tensors.size());
  for (const auto& entry : header.tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t reached = 0;
  for (const auto* entry : order) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin != reached)
      refuse(at + reached,
             "tensor " + base::quoted(name, 80) + " begins at byte " + std::to_string(tensor.begin) + " of the data, " +
                 (tensor.begin < reached ? "inside the tensor before it, which ends at " : "after a hole from ") +
                 std::to_string(reached));
    if (tensor.end > num_data_bytes)
      refuse(at + num_data_bytes, "tensor " + base::quoted(name, 80) + " ends at byte " + std::to_string(tensor.end) +
                                      " of the data; the file holds " + std::to_string(num_data_bytes));
    reached = tensor.end;
  }
  if (reached != num_data_bytes)
    refuse(at + reached, std::to_string(num_data_bytes - reached) + " bytes after the last tensor belong to none");
}

}  // namespace

SafetensorsHeader parse_header(std::string_view text, std::uint64_t num_data_bytes, const std::string& file) {
  const Refuser refuse(file);
  if (text.empty() || text.front() != '{') refuse(0, "a header begins with '{'");
  // Other white space than spaces would be legal JSON, but not legal padding.
  const std::size_t last = text.find_last_not_of(' ');
  if (text[last] != '}') refuse(last, "a header ends with '}' and spaces");
  check_tokens(text, refuse);
  SafetensorsHeader header;
  std::uint64_t at = 0;
  Handler handler(refuse, at, header);
  Json::sax_parse(CountingIterator{text.data(), &at}, CountingIterator{text.data() + text.size(), &at}, &handler);
  check_layout(header, num_data_bytes, refuse, text.size());
  return header;
}

}  // namespace lockstep::checkpoint
