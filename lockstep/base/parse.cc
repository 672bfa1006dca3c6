#include "lockstep/base/parse.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"

namespace lockstep::base {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

template <typename T>
std::optional<T> parse_all(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::optional<std::int64_t> parse_int(std::string_view text) { return parse_all<std::int64_t>(text); }

std::optional<double> parse_double(std::string_view text) {
  const auto value = parse_all<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::int64_t parse_int_in_range(std::string_view what, std::string_view text, std::int64_t low, std::int64_t high) {
  const auto value = parse_int(text);
  if (!value || *value < low || *value > high)
    throw UsageError(std::string(what) + " is " + quoted(text, 80) + "; expected an integer from " +
                     std::to_string(low) + " to " + std::to_string(high));
  return *value;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

namespace {

bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 2) return first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
  return character.size() == 1 && (first < 0x20 || first == 0x7f);
}

void append_escaped(std::string& out, std::string_view text, std::size_t limit, std::string_view also) {
  if (text.size() > limit) {
    // Do not cut inside a character: step back over UTF-8 continuation bytes.
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0) == 0x80) --limit;
    text = text.substr(0, limit);
  }
  while (!text.empty()) {
    const std::size_t valid = utf8_length(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(1, valid));
    text.remove_prefix(character.size());
    if (character == "\n") {
      out += "\\n";
    } else if (valid == 0 || is_control(character)) {
      for (const char byte : character) {
        char code[5];
        std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(byte));
        out += code;
      }
    } else {
      if (also.find(character) != std::string_view::npos) out += '\\';
      out += character;
    }
  }
}

}  // namespace

std::string quoted(std::string_view text, std::size_t limit) {
  std::string out = "\"";
  append_escaped(out, text, limit, "\"\\");
  return out + "\"";
}

std::string escaped(std::string_view text, std::size_t limit) {
  std::string out;
  append_escaped(out, text, limit, "\\");
  return out;
}

bool is_alnum_or(std::string_view text, std::string_view others) {
  return std::ranges::all_of(text, [&](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || others.find(c) != std::string_view::npos;
  });
}

std::string alternatives(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return text;
}

std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g s", static_cast<double>(time.count()) / 1000);
  return text;
}

std::string to_hex(std::string_view bytes) {
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    hex += kHexDigits[byte >> 4];
    hex += kHexDigits[byte & 15];
  }
  return hex;
}

std::optional<std::string> from_hex(std::string_view hex) {
  if (hex.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    const std::size_t high = kHexDigits.find(hex[i]), low = kHexDigits.find(hex[i + 1]);
    if (high == kHexDigits.npos || low == kHexDigits.npos) return std::nullopt;
    bytes += static_cast<char>(high << 4 | low);
  }
  return bytes;
}

}  // namespace lockstep::base
