// Splits streams into lines and progress bars, and renders those of many streams for one terminal or file, so that they
// do not overwrite each other.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::launcher::output {

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

/// Filters the lines of one rank's stderr. A traceback is held back until the line after the one that names its
/// exception, because a chain of exceptions continues there. A chain that ends with KeyboardInterrupt is left out, any
/// other is passed on. Holds back at most 1 MiB.
class TracebackFilter {
 public:
  /// Returns those of the `segments`, and of the ones held back, that are to be printed.
  std::vector<LineSegment> filter(std::vector<LineSegment> segments);
  /// Returns what is held back and to be printed, at the end of the stream.
  std::vector<LineSegment> finish() { return release(std::exchange(state_, State::kOutside)); }

 private:
  enum class State {
    kOutside,
    kFrames,       // after "Traceback", before the exception
    kException,    // after the line that names the exception
    kAfterBlank,   // after the empty line that follows it
    kBeforeChain,  // after the sentence that announces the next traceback of the chain
  };
  void advance(std::string_view line);
  /// Returns what is held back, unless it is an interrupt and `state` is after the name of the exception.
  std::vector<LineSegment> release(State state);

  State state_ = State::kOutside;
  bool is_interrupt_ = false;  // the last exception is KeyboardInterrupt
  std::vector<LineSegment> held_;
  std::size_t held_bytes_ = 0;
};

/// Converts segments to the bytes to write; does no I/O. On a terminal, the newest progress bar stays in the last row,
/// and lines are printed above it. For any other destination, the bytes are the text with prefixes.
class ConsoleRenderer {
 public:
  explicit ConsoleRenderer(bool terminal) : terminal_(terminal) {}

  /// Sets the width of the terminal; 0 if unknown. A wider bar is clipped, because a bar of two rows cannot be erased.
  void resize(int columns) { columns_ = columns; }

  /// Returns the bytes for `segment` of the stream `owner`. The text follows `prefix`, "[rank] ". In the rest of a line
  /// that was cut it follows "[rank]+".
  std::string render(const std::string& prefix, int owner, const LineSegment& segment);
  /// Returns the bytes for a text of the launcher itself. The text must end with \n.
  std::string render(std::string_view text) const { return above_bar(std::string(text)); }
  /// Returns the bytes that move the cursor to the beginning of an empty row.
  std::string close_bar();

 private:
  std::string render_plain(const std::string& line, const LineSegment& segment) const;
  std::string above_bar(std::string text) const;
  std::string clipped_bar() const;

  bool terminal_;
  int columns_ = 0;
  std::string bar_;  // in the last row; empty if there is none
  int bar_owner_ = -1;
};

/// Returns the part of `text` that fits in a row of `columns`. Colour sequences take no column; if the text is cut
/// after one, the result ends with a reset. Pure.
std::string clip_to_columns(std::string_view text, int columns);

}  // namespace lockstep::launcher::output
