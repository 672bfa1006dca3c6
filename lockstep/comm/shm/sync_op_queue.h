// SyncOpQueue: the synchronized operations of one channel, in order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {

/// Numbers operations and runs them in the order of their numbers, on the threads that wait for them. All ranks must
/// start the same operations in the same order. One thread at a time may start operations; abort() may be called from
/// another one, and any thread may wait.
class SyncOpQueue {
 public:
  /// `name` is the name of the transport, for errors. `control_blocks` must outlive this object.
  SyncOpQueue(std::string name, const ControlBlocks& control_blocks)
      : control_blocks_(control_blocks), engine_(std::move(name)) {}

  const ControlBlocks& control_blocks() const { return control_blocks_; }

  /// Constructs an `Op`, which derives from SyncOp, from the control blocks, the next number and `args`, and queues it.
  /// Does not wait for other ranks.
  template <typename Op, typename... Args>
  PendingPtr start(Args&&... args) {
    return add([op = std::make_shared<Op>(control_blocks_, reserve_numbers(1), std::forward<Args>(args)...)](
                   base::Deadline deadline) { return op->advance(deadline); });
  }

  /// Reserves `count` consecutive numbers for operations that the caller constructs. Returns the first.
  std::uint32_t reserve_numbers(std::uint32_t count) { return std::exchange(next_number_, next_number_ + count); }

  /// Completes `op` at once if the queue is empty and all its waits end while this thread spins. Does not allocate.
  /// Returns false otherwise; `op` may then have begun, and the caller must add() it.
  bool try_complete(SyncOp& op) {
    try {
      return engine_.try_now([&op] { return op.advance_spinning(); });
    } catch (const arena::ArenaFull&) {
      return false;  // it has not begun; add() reports the error
    }
  }
  /// Queues an operation that uses reserved numbers. See ProgressEngine::add().
  PendingPtr add(ProgressEngine::AdvanceFn advance_fn) { return engine_.add(std::move(advance_fn)); }
  /// See ProgressEngine::abort(). Must be called before the destructor if operations are queued.
  void abort(const std::exception_ptr& cause) noexcept { engine_.abort(cause); }

 private:
  const ControlBlocks& control_blocks_;
  std::uint32_t next_number_ = 1;
  ProgressEngine engine_;
};

}  // namespace lockstep::comm::shm
