#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm {

using base::Deadline;

/// `wait(member, signal)` says whether the signal has reached this meeting's number.
template <typename Wait>
bool Meeting::step(const Wait& wait) {
  const auto all_reached = [&](const auto& signal_of) {
    for (; next_ < boards_.size(); ++next_)
      if (next_ != boards_.rank() && !wait(next_, signal_of(boards_.of(next_)))) return false;
    return true;
  };
  if (phase_ == Phase::kShow) {
    show();
    boards_.advance(boards_.own().arrived[number_ % 2], number_);
    phase_ = Phase::kMeet;
  }
  if (phase_ == Phase::kMeet) {
    if (!all_reached([this](Board& board) -> Signal& { return board.arrived[number_ % 2]; })) return false;
    work();
    phase_ = ends_with_work() ? Phase::kFinished : Phase::kPart;
    if (phase_ == Phase::kPart) boards_.advance(boards_.own().done, number_);
    next_ = 0;
  }
  if (phase_ == Phase::kPart) {
    if (!all_reached([](Board& board) -> Signal& { return board.done; })) return false;
    finish();
    phase_ = Phase::kFinished;
  }
  return true;
}

bool Meeting::advance(Deadline deadline) {
  return step([&](int member, const Signal& signal) { return boards_.wait(member, signal, number_, deadline); });
}

bool Meeting::advance_quickly() {
  return step([&](int, const Signal& signal) { return boards_.wait_briefly(signal, number_); });
}

}  // namespace lockstep::comm
