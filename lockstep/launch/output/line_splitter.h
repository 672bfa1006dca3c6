// Splits a stream of bytes into lines and progress bars.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::output {

/// How a segment of output ended.
enum class SegmentEnd {
  kNewline,  ///< a whole line
  kReturn,   ///< a progress bar: the next segment overwrites it
  kCut,      ///< the line is too long and continues in the next segment
  kOpen,     ///< a progress bar that began with \r and may still grow; the next segment repeats its text
};

struct LineSegment {
  std::string text;  ///< without its \n or \r
  SegmentEnd end = SegmentEnd::kNewline;
  bool is_continuation = false;  ///< the previous segment ended with kCut
  bool overwrites_bar = false;   ///< a progress bar of this stream is in the current row
};

/// Splits one stream. A progress bar is a text followed by \r, or \r followed by a text (tqdm). "\r\n" ends a line.
class LineSplitter {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{1} << 20;

  /// Returns the segments that `bytes` complete, in order.
  std::vector<LineSegment> feed(std::string_view bytes);
  /// Returns the rest after the end of the stream: the last line, if it has no newline.
  std::vector<LineSegment> finish();

 private:
  void append(std::string_view text, std::vector<LineSegment>& segments);
  void emit(SegmentEnd end, std::vector<LineSegment>& segments);

  std::string line_;             // since the last \n, \r or cut
  bool overwrites_bar_ = false;  // the last segment ended with \r
  bool is_continuation_ = false;
};

}  // namespace lockstep::launcher::output
