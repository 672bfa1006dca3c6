#include "lockstep/train/loggers/text_format.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "lockstep/base/utf8.h"

namespace lockstep::training::inline loggers {

void append_number(std::string& text, double number) {
  char digits[32];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number == number ? number : __builtin_nan("")).ptr);
}

void append_number(std::string& text, std::int64_t number) { text += std::to_string(number); }

void append_seconds(std::string& text, double seconds) {
  char digits[64];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, seconds, std::chars_format::fixed, 3).ptr);
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t length = base::utf8_length(text);
    if (length == 0)
      valid += "\uFFFD";
    else
      valid += text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string escape_xml(std::string_view text) {
  std::string result;
  for (const char c : replace_invalid_utf8(text)) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      case '\'': result += "&#39;"; break;
      default:
        if (static_cast<unsigned char>(c) >= ' ' || c == '\n' || c == '\t') result += c;
    }
  }
  return result;
}

}  // namespace lockstep::training::inline loggers
