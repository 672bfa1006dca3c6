#include "lockstep/train/loggers/text_escaping.h"

#include "lockstep/base/utf8.h"

namespace lockstep::training::inline loggers {

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
