#include "lockstep/launch/screen.h"

namespace lockstep::launcher {
namespace {

const char* const kEraseRow = "\r\x1b[K";

}  // namespace

std::string Screen::above_bar(std::string text) const { return bar_.empty() ? text : kEraseRow + text + bar_; }

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
    return kEraseRow + bar_;
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
