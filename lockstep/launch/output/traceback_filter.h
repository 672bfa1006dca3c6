// Leaves out the tracebacks with which Python programs end after Ctrl-C.
#pragma once

#include <vector>

#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher::output {

/// Filters the lines of one rank's stderr. A traceback is held back until the line that names its exception: one of
/// KeyboardInterrupt is left out, any other is passed on.
class TracebackFilter {
 public:
  /// Returns those of the `segments`, and of the ones held back, that are to be printed.
  std::vector<LineSegment> filter(std::vector<LineSegment> segments);
  /// Returns what is held back, at the end of the stream.
  std::vector<LineSegment> finish();

 private:
  std::vector<LineSegment> held_;
};

}  // namespace lockstep::launcher::output
