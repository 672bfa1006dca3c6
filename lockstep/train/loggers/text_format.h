// Numbers and user text in the formats of files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::training::inline loggers {

/// Appends the shortest text that parses to `number`: "0.1", "1e-05"; "nan", "inf", "-inf".
void append_number(std::string& text, double number);
void append_number(std::string& text, std::int64_t number);
/// Appends seconds with three digits after the decimal point.
void append_seconds(std::string& text, double seconds);

/// Replaces each byte that is not valid UTF-8 by U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

/// Returns `text` as a string of JSON, in quotes; replaces invalid UTF-8.
std::string json_string(const std::string& text);

/// Returns `text` as content or attribute value of HTML or XML: escapes & < > " ', removes characters that XML does not
/// allow, and replaces invalid UTF-8.
std::string escape_xml(std::string_view text);

}  // namespace lockstep::training::inline loggers
