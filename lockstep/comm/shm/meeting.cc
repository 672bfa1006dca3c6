#include "lockstep/comm/shm/meeting.h"

#include <stdexcept>
#include <string>

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kSlice = std::chrono::milliseconds(20);  // of sleep, before a look whether the others live

}  // namespace

bool Meeting::advance(Deadline deadline) {
  if (phase_ == Phase::kShow) {
    show();
    boards_.advance(boards_.own().arrived, number_);
    phase_ = Phase::kMeet;
  }
  if (phase_ == Phase::kMeet) {
    if (!all_reached(&Board::arrived, deadline)) return false;
    work();
    phase_ = ends_with_work() ? Phase::kFinished : Phase::kPart;
    if (phase_ == Phase::kPart) boards_.advance(boards_.own().done, number_);
    next_ = 0;
  }
  if (phase_ == Phase::kPart) {
    if (!all_reached(&Board::done, deadline)) return false;
    finish();
    phase_ = Phase::kFinished;
  }
  return true;
}

bool Meeting::all_reached(Signal Board::* signal, Deadline deadline) {
  for (; next_ < boards_.size(); ++next_) {
    if (next_ == boards_.rank()) continue;
    const Signal& theirs = boards_.of(next_).*signal;
    while (!reached(theirs, number_)) {
      if (deadline.expired()) return false;
      if (boards_.wait(theirs, number_, earlier(deadline, Deadline::in(kSlice)))) break;
      // It may have ended after it did its part: then this is the last look that is needed.
      if (!boards_.alive(next_) && !reached(theirs, number_))
        throw std::runtime_error("the process of its member " + std::to_string(next_) + " has ended");
    }
  }
  return true;
}

}  // namespace lockstep::comm
