// Combines the segments of many streams for one destination, so that progress bars and lines do not overwrite each
// other.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher {

/// Converts segments to the bytes to write; does no I/O. On a terminal, the newest progress bar stays in the last row
/// and lines are printed above it; elsewhere, the bytes are passed through with their prefixes.
class ConsoleRenderer {
 public:
  explicit ConsoleRenderer(bool terminal) : terminal_(terminal) {}

  /// Sets the width of the terminal; 0 if unknown. A bar that is wider is clipped, because a bar of two rows cannot be
  /// erased.
  void resize(int columns) { columns_ = columns; }

  /// Returns the bytes for `segment` of the stream `owner`, preceded by `prefix`, "[rank] ", or by "[rank]+" for the
  /// rest of a line that was cut.
  std::string render(const std::string& prefix, int owner, const LineSegment& segment);
  /// Returns the bytes for a text of the launcher itself, which must end with \n.
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

/// Returns the part of `text` that fits in a row of `columns`. Colour sequences take no column and are reset at the
/// end. Pure.
std::string clip_to_columns(std::string_view text, int columns);

}  // namespace lockstep::launcher
