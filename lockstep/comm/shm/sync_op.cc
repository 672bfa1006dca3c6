#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {

using base::Deadline;

bool SyncOp::advance(std::optional<Deadline> deadline) {
  const auto wait_for_all = [&](const auto& counter_of) {
    for (; next_member_ < control_blocks_.size(); ++next_member_) {
      if (next_member_ == control_blocks_.rank()) continue;
      const SharedCounter& counter = counter_of(control_blocks_.of(next_member_));
      if (!(deadline ? control_blocks_.wait(next_member_, counter, number_, *deadline)
                     : control_blocks_.wait_spinning(counter, number_)))
        return false;
    }
    return true;
  };
  if (phase_ == Phase::kPublish) {
    publish();
    control_blocks_.advance(control_blocks_.own().published[number_ % 2], number_);
    phase_ = Phase::kWaitPublished;
  }
  if (phase_ == Phase::kWaitPublished) {
    if (!wait_for_all(
            [this](ControlBlock& control_block) -> SharedCounter& { return control_block.published[number_ % 2]; }))
      return false;
    compute();
    phase_ = is_complete_after_compute() ? Phase::kFinished : Phase::kWaitCompleted;
    if (phase_ == Phase::kWaitCompleted) control_blocks_.advance(control_blocks_.own().completed, number_);
    next_member_ = 0;
  }
  if (phase_ == Phase::kWaitCompleted) {
    if (!wait_for_all([](ControlBlock& control_block) -> SharedCounter& { return control_block.completed; }))
      return false;
    complete();
    phase_ = Phase::kFinished;
  }
  return true;
}

}  // namespace lockstep::comm::shm
