// How the pieces of many streams share one destination, so that a progress bar and whole lines do not spoil each other.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher {

/// Pure but for what it remembers: which bar stands on the last row. On a terminal the newest bar stays there and lines
/// appear above it; elsewhere bytes come as they are, with prefixes.
class ConsoleRenderer {
 public:
  explicit ConsoleRenderer(bool terminal) : terminal_(terminal) {}

  /// The terminal has so many columns now; 0: nobody knows. A bar that is wider is cut: one of two rows could not be
  /// erased.
  void resize(int columns) { columns_ = columns; }

  /// The bytes that show `piece` of stream `owner`, with `prefix`, "[rank] ", in front; "[rank]+" marks the rest of a
  /// line that was cut.
  std::string show(const std::string& prefix, int owner, const LineSegment& segment);
  /// The bytes that show a whole text of our own, which ends with \n.
  std::string show(std::string_view text) const { return above_bar(std::string(text)); }
  /// The bytes after which the cursor is at the beginning of a row.
  std::string close_bar();

 private:
  std::string render_plain(const std::string& line, const LineSegment& segment) const;
  std::string above_bar(std::string text) const;
  std::string clipped_bar() const;

  bool terminal_;
  int columns_ = 0;
  std::string bar_;  // empty: none
  int bar_owner_ = -1;
};

/// What of `text` has room in a row of `columns`. Sequences that colour it take none, and are ended. Pure.
std::string clip_to_columns(std::string_view text, int columns);

}  // namespace lockstep::launcher
