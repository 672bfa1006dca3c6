// Renders the segments of many streams for one terminal or file, so that progress bars and lines do not overwrite each
// other.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher::output {

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
