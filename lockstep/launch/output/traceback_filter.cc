#include "lockstep/launch/output/traceback_filter.h"

#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep::launcher::output {
namespace {

constexpr std::string_view kBegin = "Traceback (most recent call last):";
constexpr std::string_view kInterrupt = "KeyboardInterrupt";
constexpr std::size_t kMaxHeldBytes = std::size_t{1} << 20;

bool announces_chain(std::string_view line) {
  return line.starts_with("During handling of the above exception") ||
         line.starts_with("The above exception was the direct cause");
}

}  // namespace

void TracebackFilter::advance(std::string_view line) {
  if (line == kBegin) {
    state_ = State::kFrames;
  } else if (state_ == State::kFrames && !line.empty() && line.front() != ' ') {
    state_ = State::kException;
    is_interrupt_ = line.starts_with(kInterrupt);
  } else if (state_ == State::kException && line.empty()) {
    state_ = State::kAfterBlank;
  } else if (state_ == State::kAfterBlank && announces_chain(line)) {
    state_ = State::kBeforeChain;
  } else if (state_ == State::kException || state_ == State::kAfterBlank ||
             (state_ == State::kBeforeChain && !line.empty())) {
    state_ = State::kOutside;
  }
}

std::vector<LineSegment> TracebackFilter::filter(std::vector<LineSegment> segments) {
  std::vector<LineSegment> passed;
  for (LineSegment& segment : segments) {
    const State before = state_;
    advance(segment.text);
    const bool begins_anew = segment.text == kBegin && before != State::kBeforeChain;
    if (held_bytes_ > kMaxHeldBytes) state_ = State::kOutside;
    if (state_ == State::kOutside || begins_anew) {
      std::vector<LineSegment> released = release(before);
      passed.insert(passed.end(), std::make_move_iterator(released.begin()), std::make_move_iterator(released.end()));
    }
    if (state_ == State::kOutside) {
      passed.push_back(std::move(segment));
    } else {
      held_bytes_ += segment.text.size() + 1;
      held_.push_back(std::move(segment));
    }
  }
  return passed;
}

std::vector<LineSegment> TracebackFilter::finish() { return release(std::exchange(state_, State::kOutside)); }

std::vector<LineSegment> TracebackFilter::release(State state) {
  const bool is_complete = state == State::kException || state == State::kAfterBlank;
  held_bytes_ = 0;
  std::vector<LineSegment> released = std::exchange(held_, {});
  if (std::exchange(is_interrupt_, false) && is_complete) released.clear();
  return released;
}

}  // namespace lockstep::launcher::output
