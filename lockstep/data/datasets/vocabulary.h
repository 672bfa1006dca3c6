// Maps characters to small integers and back.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data::inline datasets {

/// A set of symbols, numbered from 0. A symbol is one UTF-8 character, or one byte where the text is not valid UTF-8.
/// Every text is therefore a sequence of symbols, and decode(encode(text)) == text.
class Vocabulary {
 public:
  /// Returns the symbols that occur in `text`, in byte order.
  static Vocabulary from_text(std::string_view text);
  /// Returns all 256 bytes; this vocabulary encodes any text.
  static Vocabulary bytes();
  /// Uses these symbols in this order, as symbols() returns them. Throws UsageError if a symbol occurs twice, is empty,
  /// or is not a single symbol.
  explicit Vocabulary(std::vector<std::string> symbols);

  std::size_t size() const { return symbols_.size(); }
  const std::vector<std::string>& symbols() const { return symbols_; }

  /// Returns the numbers of the symbols in `text`. Throws UsageError, which names the first symbol that is not in the
  /// vocabulary and its byte offset.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Returns the text of `ids`. Throws UsageError for a number outside [0, size()).
  std::string decode(const std::vector<std::int64_t>& ids) const;

 private:
  std::vector<std::string> symbols_;
  std::array<std::int32_t, 256> single_byte_ids_;                    // number of the symbol of one byte; -1: none
  std::map<std::string, std::int32_t, std::less<>> multi_byte_ids_;  // numbers of the other symbols
  bool is_byte_level_ = false;  // all 256 symbols are bytes, so encode() does not parse UTF-8
};

}  // namespace lockstep::data::inline datasets
