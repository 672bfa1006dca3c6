#include "lockstep/launch/output/traceback_filter.h"

#include <string>
#include <string_view>
#include <utility>

namespace lockstep::launcher::output {
namespace {

constexpr std::string_view kBegin = "Traceback (most recent call last):";
constexpr std::string_view kInterrupt = "KeyboardInterrupt";
constexpr std::size_t kMaxHeld = 10000;  // lines

/// Returns whether a line after kBegin still belongs to the traceback, or to one that follows from it.
bool continues(std::string_view line) {
  return line.empty() || line.front() == ' ' || line == kBegin ||
         line.starts_with("During handling of the above exception") ||
         line.starts_with("The above exception was the direct cause");
}

}  // namespace

std::vector<LineSegment> TracebackFilter::filter(std::vector<LineSegment> segments) {
  std::vector<LineSegment> passed;
  for (LineSegment& segment : segments) {
    const std::string_view line = segment.text;
    if (held_.empty() && line != kBegin) {
      passed.push_back(std::move(segment));
      continue;
    }
    const bool is_end = !continues(line), is_interrupt = line.starts_with(kInterrupt);
    held_.push_back(std::move(segment));
    if (!is_end && held_.size() < kMaxHeld) continue;
    if (!is_interrupt)
      passed.insert(passed.end(), std::make_move_iterator(held_.begin()), std::make_move_iterator(held_.end()));
    held_.clear();
  }
  return passed;
}

std::vector<LineSegment> TracebackFilter::finish() { return std::exchange(held_, {}); }

}  // namespace lockstep::launcher::output
