// Characters as small numbers.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

/// A set of symbols, numbered from 0. A symbol is one character of UTF-8, or one byte where there is no valid
/// character; so every text is a sequence of symbols, and decode(encode(text)) == text.
class Vocabulary {
 public:
  /// The symbols that occur in `text`, in the order of their bytes.
  static Vocabulary from_text(std::string_view text);
  /// All 256 bytes: encodes anything, without a look at the text.
  static Vocabulary bytes();
  /// These symbols in this order, as symbols() returned them. Throws UsageError for one that is there twice, empty, or
  /// no single symbol.
  explicit Vocabulary(std::vector<std::string> symbols);

  std::size_t size() const { return symbols_.size(); }
  const std::vector<std::string>& symbols() const { return symbols_; }

  /// Throws UsageError naming the first symbol that is not in the vocabulary, and where it stands.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Throws UsageError for a number outside [0, size()).
  std::string decode(const std::vector<std::int64_t>& ids) const;

 private:
  std::vector<std::string> symbols_;
  std::array<std::int32_t, 256> single_byte_ids_;                    // id of a symbol of one byte, -1: none
  std::map<std::string, std::int32_t, std::less<>> multi_byte_ids_;  // of the others
  bool is_byte_level_ = false;  // all symbols are single bytes: no UTF-8 is looked for
};

}  // namespace lockstep::data
