#include "lockstep/comm/shm/meeting.h"

namespace lockstep::comm {

using base::Deadline;

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
  for (; next_ < boards_.size(); ++next_)
    if (next_ != boards_.rank() && !boards_.wait(next_, boards_.of(next_).*signal, number_, deadline)) return false;
  return true;
}

}  // namespace lockstep::comm
