// How the pieces of many streams share one destination, so that a progress bar and whole lines do not spoil each other.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/line_splitter.h"

namespace lockstep::launcher {

/// Pure but for what it remembers: which bar stands on the last row. On a terminal the newest bar stays there and lines
/// appear above it; elsewhere bytes come as they are, with prefixes.
class Screen {
 public:
  explicit Screen(bool terminal) : terminal_(terminal) {}

  /// The bytes that show `piece` of stream `owner`, with `prefix`, "[rank] ", in front; "[rank]+" marks the rest of a line that was cut.
  std::string show(const std::string& prefix, int owner, const Piece& piece);
  /// The bytes that show a whole text of our own, which ends with \n.
  std::string show(std::string_view text) const { return above_bar(std::string(text)); }
  /// The bytes after which the cursor is at the beginning of a row.
  std::string leave();

 private:
  std::string show_plain(const std::string& line, const Piece& piece) const;
  std::string above_bar(std::string text) const;

  bool terminal_;
  std::string bar_;  // empty: none
  int bar_owner_ = -1;
};

}  // namespace lockstep::launcher
