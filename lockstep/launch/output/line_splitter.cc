#include "lockstep/launch/output/line_splitter.h"

#include <algorithm>

namespace lockstep::launcher::output {

void LineSplitter::emit(SegmentEnd end, std::vector<LineSegment>& segments) {
  segments.push_back({std::move(line_), end, is_continuation_, overwrites_bar_});
  line_.clear();
  is_continuation_ = end == SegmentEnd::kCut;
  overwrites_bar_ = end == SegmentEnd::kReturn;
}

void LineSplitter::append(std::string_view text, std::vector<LineSegment>& segments) {
  while (line_.size() + text.size() > kMaxLineBytes) {
    std::size_t size = kMaxLineBytes - line_.size();
    // Do not cut inside a UTF-8 character, unless the bytes are not UTF-8.
    for (int back = 0; back < 3 && size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80; ++back) --size;
    line_.append(text.substr(0, size));
    text.remove_prefix(size);
    emit(SegmentEnd::kCut, segments);
  }
  line_.append(text);
}

std::vector<LineSegment> LineSplitter::feed(std::string_view bytes) {
  std::vector<LineSegment> segments;
  while (!bytes.empty()) {
    const std::size_t end = std::min(bytes.find_first_of("\r\n"), bytes.size());
    append(bytes.substr(0, end), segments);
    if (end == bytes.size()) break;
    const bool newline = bytes[end] == '\n';
    const bool both = !newline && end + 1 < bytes.size() && bytes[end + 1] == '\n';
    bytes.remove_prefix(end + (both ? 2 : 1));
    if (newline || both) {
      emit(SegmentEnd::kNewline, segments);
    } else if (line_.empty()) {
      overwrites_bar_ = true;  // the \r comes before the text of the bar
    } else {
      emit(SegmentEnd::kReturn, segments);
    }
  }
  if (overwrites_bar_ && !line_.empty()) segments.push_back({line_, SegmentEnd::kOpen, false, true});
  return segments;
}

std::vector<LineSegment> LineSplitter::finish() {
  std::vector<LineSegment> segments;
  if (!line_.empty() || overwrites_bar_) emit(SegmentEnd::kNewline, segments);
  return segments;
}

}  // namespace lockstep::launcher::output
