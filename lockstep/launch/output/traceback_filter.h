// Leaves out the tracebacks with which Python programs end after Ctrl-C.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher::output {

/// Filters the lines of one rank's stderr. A traceback is held back until the line after the one that names its
/// exception, because a chain of exceptions continues there. A chain that ends with KeyboardInterrupt is left out, any
/// other is passed on. Holds back at most 1 MiB.
class TracebackFilter {
 public:
  /// Returns those of the `segments`, and of the ones held back, that are to be printed.
  std::vector<LineSegment> filter(std::vector<LineSegment> segments);
  /// Returns what is held back and to be printed, at the end of the stream.
  std::vector<LineSegment> finish();

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

}  // namespace lockstep::launcher::output
