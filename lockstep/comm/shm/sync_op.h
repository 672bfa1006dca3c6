// A synchronized operation of the ranks of a host (publish, compute, complete), and the queue of those of a channel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/progress_engine.h"

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
  /// `other` must not be advanced any more; it counts as finished.
  SyncOp(SyncOp&& other) noexcept
      : control_blocks_(other.control_blocks_),
        number_(other.number_),
        phase_(std::exchange(other.phase_, Phase::kFinished)),
        next_member_(other.next_member_) {}
  SyncOp(const SyncOp&) = delete;
  SyncOp& operator=(const SyncOp&) = delete;

  /// Makes progress until `deadline`; without one, as long as each wait ends while this thread spins, and does not
  /// sleep. Returns true when the operation is finished. Throws std::runtime_error if the process of a member that it
  /// waits for until a deadline has ended, and ArenaFull.
  bool advance(std::optional<base::Deadline> deadline);

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
  Phase phase_ = Phase::kPublish;
  int next_member_ = 0;  // the member that this operation waits for
};

/// Numbers operations and runs them in the order of their numbers, on the threads that wait for them. All ranks must
/// start the same operations in the same order. One thread at a time may start operations; abort() may be called from
/// another one, and any thread may wait.
class SyncOpQueue : public ProgressEngine {
 public:
  /// `name` is the name of the transport, for errors. `control_blocks` must outlive this object.
  SyncOpQueue(std::string name, const ControlBlocks& control_blocks)
      : ProgressEngine(std::move(name)), control_blocks_(control_blocks) {}

  const ControlBlocks& control_blocks() const { return control_blocks_; }

  /// Reserves `count` consecutive numbers for operations that the caller constructs and add()s. Returns the first.
  std::uint32_t reserve_numbers(std::uint32_t count) { return std::exchange(next_number_, next_number_ + count); }

  /// Completes `op` at once if the queue is empty and all its waits end while this thread spins. Does not allocate.
  /// Returns false otherwise; `op` may then have begun, and the caller must add() it.
  bool try_complete(SyncOp& op) {
    try {
      return try_now([&op] { return op.advance(std::nullopt); });
    } catch (const arena::ArenaFull&) {
      return false;  // it has not begun; add() reports the error
    }
  }

 private:
  const ControlBlocks& control_blocks_;
  std::uint32_t next_number_ = 1;
};

}  // namespace lockstep::comm::shm
