// Strict parsing of numbers and lists from untrusted input, and their text in messages. Every parser parses its whole
// input: a valid prefix is not accepted.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace lockstep::base {

/// Parses all of `text` as a decimal integer. Returns nullopt for "", "12a", " 1", "+1" and values outside 64 bits.
std::optional<std::int64_t> parse_int(std::string_view text);

/// Parses all of `text` as a finite decimal number. Returns nullopt for anything else.
std::optional<double> parse_double(std::string_view text);

/// Parses `text` as an integer in [low, high]. Throws a UsageError that names `what`, the text and the bounds
/// otherwise.
std::int64_t parse_int_in_range(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high);

/// Splits `text` at every `separator`. For "", returns one empty string.
std::vector<std::string> split(std::string_view text, char separator);

/// Returns at most `limit` bytes of `text` in double quotes, with \" \\ \n and other control characters escaped, also
/// those of C1 and bytes that are not UTF-8.
std::string quoted(std::string_view text, std::size_t limit = 1024);
/// The same without quotes, in which \" is not escaped: for names of files and processes in a text for a terminal,
/// which other users may have chosen.
std::string escaped(std::string_view text, std::size_t limit = 1024);

/// Returns whether all of `text` are ASCII letters, digits or characters of `others`; true for "".
bool is_alnum_or(std::string_view text, std::string_view others);

/// Returns the text of each item, which is what `text_of` returns, a text or a number, separated by `separator`.
template <typename Items, typename TextOf = std::identity>
std::string joined(const Items& items, std::string_view separator = ", ", const TextOf& text_of = {}) {
  std::string text;
  for (const auto& item : items) {
    if (!text.empty()) text += separator;
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(text_of(item))>>)
      text += std::to_string(text_of(item));
    else
      text += text_of(item);
  }
  return text;
}

/// Returns "a, b or c".
std::string alternatives(const std::vector<std::string>& words);

/// Returns a time such as "5 s" or "0.25 s".
std::string seconds_text(std::chrono::milliseconds time);

/// Returns two lower-case hexadecimal digits per byte.
std::string to_hex(std::string_view bytes);

/// Parses all of `hex` as to_hex() writes it. Returns nullopt for an odd length or another character.
std::optional<std::string> from_hex(std::string_view hex);

}  // namespace lockstep::base
