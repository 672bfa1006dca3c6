// A stream of bytes, cut into what may be shown on its own.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// How a piece of output ended.
enum class SegmentEnd {
  kNewline,  ///< a whole line
  kReturn,   ///< a progress bar: the next piece is written over it
  kCut,      ///< the line is too long, and goes on in the next piece
  kOpen,     ///< a progress bar that began with \r and may still grow; the next piece repeats what it holds
};

struct LineSegment {
  std::string text;  ///< without its \n or \r
  SegmentEnd end = SegmentEnd::kNewline;
  bool is_continuation = false;  ///< the piece before was cut
  bool overwrites_bar = false;   ///< a progress bar of this stream stands on the row
};

/// Two styles of progress bars are in use: text then \r, and \r then text (tqdm). "\r\n" is one end of line.
class LineSplitter {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{64} << 10;

  /// The pieces that `bytes` complete, in order.
  std::vector<LineSegment> feed(std::string_view bytes);
  /// What is left when the stream has ended: its last line without a newline, if there is one.
  std::vector<LineSegment> finish();

 private:
  void append(std::string_view text, std::vector<LineSegment>& segments);
  void emit(SegmentEnd end, std::vector<LineSegment>& segments);

  std::string line_;             // since the last \n, \r or cut
  bool overwrites_bar_ = false;  // the last end was \r
  bool is_continuation_ = false;
};

}  // namespace lockstep::launcher
