#include "lockstep/launch/output/console_renderer.h"

#include <algorithm>

namespace lockstep::launcher::output {
namespace {

const char* const kEraseRow = "\r\x1b[K";

}  // namespace

std::string clip_to_columns(std::string_view text, int columns) {
  int columns_left = columns - 1;  // after the last column, some terminals begin a new row
  bool coloured = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {
      coloured = true;
      i = std::min(text.find_first_not_of("0123456789;?", i + 2), text.size());
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && columns_left-- <= 0) {
      return std::string(text.substr(0, i)) + (coloured ? "\x1b[0m" : "");
    }
  }
  return std::string(text);
}

std::string ConsoleRenderer::clipped_bar() const { return columns_ > 0 ? clip_to_columns(bar_, columns_) : bar_; }

std::string ConsoleRenderer::above_bar(std::string text) const {
  return bar_.empty() ? text : kEraseRow + text + clipped_bar();
}

std::string ConsoleRenderer::render_plain(const std::string& line, const LineSegment& segment) const {
  switch (segment.end) {
    case SegmentEnd::kReturn: return line + "\r";
    case SegmentEnd::kOpen: return "";
    case SegmentEnd::kNewline:
    case SegmentEnd::kCut: break;
  }
  return segment.overwrites_bar && segment.text.empty() ? "\n" : line + "\n";
}

std::string ConsoleRenderer::render(const std::string& prefix, int owner, const LineSegment& segment) {
  std::string line = prefix;
  if (segment.is_continuation) line.back() = '+';
  line += segment.text;
  if (!terminal_) return render_plain(line, segment);

  if (segment.end == SegmentEnd::kReturn || segment.end == SegmentEnd::kOpen) {
    bar_ = std::move(line);
    bar_owner_ = owner;
    return kEraseRow + clipped_bar();
  }
  const bool only_newline = segment.overwrites_bar && segment.text.empty();
  if (bar_owner_ != owner) return only_newline ? "" : above_bar(line + "\n");
  const std::string last = only_newline ? bar_ : line;
  bar_.clear();
  bar_owner_ = -1;
  return kEraseRow + last + "\n";
}

std::string ConsoleRenderer::close_bar() {
  const bool open = !bar_.empty();
  bar_.clear();
  bar_owner_ = -1;
  return open ? "\n" : "";
}

}  // namespace lockstep::launcher::output
