// Strict reading of numbers and lists that come from outside. Nothing here accepts a prefix of its input.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::base {

/// The whole of `text` as a decimal integer; nothing for "", "12a", " 1", "+1" or what does not fit in 64 bits.
std::optional<std::int64_t> parse_int(std::string_view text);

/// The whole of `text` as a finite decimal number.
std::optional<double> parse_double(std::string_view text);

/// `text` as an integer in [low, high]; otherwise a UsageError that names `what`, the text and the bounds.
std::int64_t parse_int_in_range(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high);

/// `text` cut at every `separator`; "" gives one empty piece.
std::vector<std::string> split(std::string_view text, char separator);

/// `text` in double quotes, with \" \\ \n and other control characters escaped and at most `limit` bytes of it.
std::string quoted(std::string_view text, std::size_t limit = 1024);

}  // namespace lockstep::base
