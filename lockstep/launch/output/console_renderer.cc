#include "lockstep/launch/output/console_renderer.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lockstep::launcher::output {
namespace {

constexpr std::string_view kBegin = "Traceback (most recent call last):";
constexpr std::string_view kInterrupt = "KeyboardInterrupt";
constexpr std::size_t kMaxHeldBytes = std::size_t{1} << 20;

bool announces_chain(std::string_view line) {
  return line.starts_with("During handling of the above exception") ||
         line.starts_with("The above exception was the direct cause");
}

const char* const kEraseRow = "\r\x1b[K";

}  // namespace

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

void TracebackFilter::advance(std::string_view line) {
  if (line == kBegin) {
    state_ = State::kFrames;
  } else if (state_ == State::kFrames && !line.empty() && line.front() != ' ') {
    state_ = State::kException;
    is_interrupt_ = line.starts_with(kInterrupt);
  } else if (state_ == State::kException && line.empty()) {
    state_ = State::kAfterBlank;
  } else if (state_ == State::kAfterBlank && announces_chain(line)) {
    state_ = State::kBeforeChain;
  } else if (state_ == State::kException || state_ == State::kAfterBlank ||
             (state_ == State::kBeforeChain && !line.empty())) {
    state_ = State::kOutside;
  }
}

std::vector<LineSegment> TracebackFilter::filter(std::vector<LineSegment> segments) {
  std::vector<LineSegment> passed;
  for (LineSegment& segment : segments) {
    const State before = state_;
    advance(segment.text);
    const bool begins_anew = segment.text == kBegin && before != State::kBeforeChain;
    if (held_bytes_ > kMaxHeldBytes) state_ = State::kOutside;
    if (state_ == State::kOutside || begins_anew) {
      std::vector<LineSegment> released = release(before);
      passed.insert(passed.end(), std::make_move_iterator(released.begin()), std::make_move_iterator(released.end()));
    }
    if (state_ == State::kOutside) {
      passed.push_back(std::move(segment));
    } else {
      held_bytes_ += segment.text.size() + 1;
      held_.push_back(std::move(segment));
    }
  }
  return passed;
}

std::vector<LineSegment> TracebackFilter::release(State state) {
  const bool is_complete = state == State::kException || state == State::kAfterBlank;
  held_bytes_ = 0;
  std::vector<LineSegment> released = std::exchange(held_, {});
  if (std::exchange(is_interrupt_, false) && is_complete) released.clear();
  return released;
}

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
