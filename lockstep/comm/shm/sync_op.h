// Something that the ranks of a host do together.
#pragma once

#include <cstdint>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {

/// Shows this rank's data, waits until all have, does this rank's share of the work, and waits until all have done
/// theirs. Advanced by one thread at a time.
class SyncOp {
 public:
  SyncOp(const ControlBlocks& control_blocks, std::uint32_t number)
      : control_blocks_(control_blocks), number_(number) {}
  virtual ~SyncOp() = default;
  SyncOp(const SyncOp&) = delete;
  SyncOp& operator=(const SyncOp&) = delete;

  /// Does what can be done until `deadline`. True when it is finished. Throws when a member that is waited for has
  /// died, and ArenaFull.
  bool advance(base::Deadline deadline);
  /// The same, as long as others come while this spins.
  bool advance_spinning();

 protected:
  /// Writes what the others read.
  virtual void publish() = 0;
  /// All have shown theirs.
  virtual void compute() = 0;
  /// All have done their work.
  virtual void complete() = 0;
  /// Nobody reads what another rank could change after work(): then there is no need to wait for each other again.
  virtual bool is_complete_after_compute() const = 0;

  /// Others may be at this rank's data: it has been shown, and not all have done their work.
  bool is_exposed() const { return phase_ == Phase::kWaitPublished || phase_ == Phase::kWaitCompleted; }

  const ControlBlocks& control_blocks_;
  const std::uint32_t number_;

 private:
  enum class Phase { kPublish, kWaitPublished, kWaitCompleted, kFinished };
  template <typename Wait>
  bool advance_phases(const Wait& wait);

  Phase phase_ = Phase::kPublish;
  int next_member_ = 0;  // the member that is waited for
};

}  // namespace lockstep::comm
