#include "lockstep/launch/output/line_splitter.h"

#include <algorithm>

namespace lockstep::launcher {

void LineSplitter::emit(PieceEnd end, std::vector<Piece>& pieces) {
  pieces.push_back({std::move(line_), end, continues_, over_bar_});
  line_.clear();
  continues_ = end == PieceEnd::kCut;
  over_bar_ = end == PieceEnd::kReturn;
}

void LineSplitter::take(std::string_view text, std::vector<Piece>& pieces) {
  while (line_.size() + text.size() > kMaxLine) {
    std::size_t size = kMaxLine - line_.size();
    // Not inside a UTF-8 character, unless there is none.
    for (int back = 0; back < 3 && size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80; ++back) --size;
    line_.append(text.substr(0, size));
    text.remove_prefix(size);
    emit(PieceEnd::kCut, pieces);
  }
  line_.append(text);
}

std::vector<Piece> LineSplitter::feed(std::string_view bytes) {
  std::vector<Piece> pieces;
  while (!bytes.empty()) {
    const std::size_t end = std::min(bytes.find_first_of("\r\n"), bytes.size());
    take(bytes.substr(0, end), pieces);
    if (end == bytes.size()) break;
    const bool newline = bytes[end] == '\n';
    const bool both = !newline && end + 1 < bytes.size() && bytes[end + 1] == '\n';
    bytes.remove_prefix(end + (both ? 2 : 1));
    if (newline || both) {
      emit(PieceEnd::kNewline, pieces);
    } else if (line_.empty()) {
      over_bar_ = true;  // \r in front of its text
    } else {
      emit(PieceEnd::kReturn, pieces);
    }
  }
  if (over_bar_ && !line_.empty()) pieces.push_back({line_, PieceEnd::kOpen, false, true});
  return pieces;
}

std::vector<Piece> LineSplitter::finish() {
  std::vector<Piece> pieces;
  if (!line_.empty() || over_bar_) emit(PieceEnd::kNewline, pieces);
  return pieces;
}

}  // namespace lockstep::launcher
