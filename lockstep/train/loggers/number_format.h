// Numbers as text that parses to the same number.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>

namespace lockstep::training::inline loggers {

/// Appends the shortest text that parses to `number`: "0.1", "1e-05"; "nan", "inf", "-inf".
inline void append_number(std::string& text, double number) {
  char digits[32];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number == number ? number : __builtin_nan("")).ptr);
}
inline void append_number(std::string& text, std::int64_t number) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}
/// Appends seconds with three digits after the decimal point.
inline void append_seconds(std::string& text, double seconds) {
  char digits[64];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, seconds, std::chars_format::fixed, 3).ptr);
}

}  // namespace lockstep::training::inline loggers
