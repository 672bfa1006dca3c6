// A synchronized operation of the ranks of a host: publish, compute, complete.
#pragma once

#include <cstdint>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm::shm {

/// Publishes this rank's data, waits until all members have published theirs, does this rank's share of the work, and
/// waits until all members have done theirs. One thread at a time may advance it.
///
/// Memory ordering: after publish() the operation stores its number to this rank's `published` counter (release).
/// Before compute() it has loaded that number from the `published` counter of every member (acquire), so compute()
/// reads what every member wrote in its publish() and before. After compute() it stores the number to `completed`
/// (release), and before complete() it has loaded it from every member (acquire), so complete() reads what every member
/// wrote in its compute(). An operation with is_complete_after_compute() skips the second half: its results must be in
/// memory that only this rank writes.
class SyncOp {
 public:
  SyncOp(const ControlBlocks& control_blocks, std::uint32_t number)
      : control_blocks_(control_blocks), number_(number) {}
  virtual ~SyncOp() = default;
  SyncOp(const SyncOp&) = delete;
  SyncOp& operator=(const SyncOp&) = delete;

  /// Makes progress until `deadline`. Returns true when the operation is finished. Throws std::runtime_error if the
  /// process of a member that it waits for has ended, and ArenaFull.
  bool advance(base::Deadline deadline);
  /// Makes progress as long as each wait ends while this thread spins; does not sleep. Returns true when finished.
  bool advance_spinning();

 protected:
  /// Writes the data that the other members read. By default there is none.
  virtual void publish() {}
  /// Called when all members have published.
  virtual void compute() = 0;
  /// Called when all members have computed. Does nothing by default.
  virtual void complete() {}
  /// True if no member reads or writes another member's memory after compute(), so that the second wait is unnecessary.
  virtual bool is_complete_after_compute() const = 0;

  /// True while other members may access this rank's data: it has been published, and not all members have computed.
  bool is_exposed() const { return phase_ == Phase::kWaitPublished || phase_ == Phase::kWaitCompleted; }

  const ControlBlocks& control_blocks_;
  const std::uint32_t number_;

 private:
  enum class Phase { kPublish, kWaitPublished, kWaitCompleted, kFinished };
  template <typename Wait>
  bool advance_phases(const Wait& wait);

  Phase phase_ = Phase::kPublish;
  int next_member_ = 0;  // the member that this operation waits for
};

}  // namespace lockstep::comm::shm
