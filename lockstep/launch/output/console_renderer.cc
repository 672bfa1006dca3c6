#include "lockstep/launch/output/console_renderer.h"

#include <algorithm>

namespace lockstep::launcher {
namespace {

const char* const kEraseRow = "\r\x1b[K";

}  // namespace

std::string cut_to_row(std::string_view text, int columns) {
  int room = columns - 1;  // in the last column some terminals begin a new row
  bool coloured = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {
      coloured = true;
      i = std::min(text.find_first_not_of("0123456789;?", i + 2), text.size());
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && room-- <= 0) {
      return std::string(text.substr(0, i)) + (coloured ? "\x1b[0m" : "");
    }
  }
  return std::string(text);
}

std::string Screen::shown_bar() const { return columns_ > 0 ? cut_to_row(bar_, columns_) : bar_; }

std::string Screen::above_bar(std::string text) const { return bar_.empty() ? text : kEraseRow + text + shown_bar(); }

std::string Screen::show_plain(const std::string& line, const Piece& piece) const {
  switch (piece.end) {
    case PieceEnd::kReturn: return line + "\r";
    case PieceEnd::kOpen: return "";
    default: return piece.over_bar && piece.text.empty() ? "\n" : line + "\n";
  }
}

std::string Screen::show(const std::string& prefix, int owner, const Piece& piece) {
  std::string line = prefix;
  if (piece.continues) line.back() = '+';
  line += piece.text;
  if (!terminal_) return show_plain(line, piece);

  if (piece.end == PieceEnd::kReturn || piece.end == PieceEnd::kOpen) {
    bar_ = std::move(line);
    bar_owner_ = owner;
    return kEraseRow + shown_bar();
  }
  const bool only_newline = piece.over_bar && piece.text.empty();
  if (bar_owner_ != owner) return only_newline ? "" : above_bar(line + "\n");
  const std::string last = only_newline ? bar_ : line;
  bar_.clear();
  bar_owner_ = -1;
  return kEraseRow + last + "\n";
}

std::string Screen::leave() {
  const bool open = !bar_.empty();
  bar_.clear();
  bar_owner_ = -1;
  return open ? "\n" : "";
}

}  // namespace lockstep::launcher
