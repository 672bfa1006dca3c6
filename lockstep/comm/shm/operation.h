// One collective operation on its way through shared memory.
#pragma once

#include <cstdint>
#include <functional>

#include "lockstep/comm/seam/collective.h"
#include "lockstep/comm/seam/pending.h"
#include "lockstep/comm/shm/board.h"

namespace lockstep::comm {

/// Shows this rank's data, meets the others, does this rank's share, and, when data was read where it lies, meets them again. Advanced by
/// one thread at a time.
class Operation {
 public:
  Operation(const Collective& op, const Boards& boards, std::uint32_t number);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Does what can be done until `deadline`. True when it is finished. Throws PeerLost when a member has died that others wait for, ArenaFull.
  bool advance(base::Deadline deadline);

 private:
  enum class Phase { kShow, kMeet, kPart, kFinished };
  void show();
  bool all_reached(Signal Board::* signal, base::Deadline deadline);
  void work();
  void reduce_claimed();
  void reduce_into(std::size_t first, std::size_t count, bool everywhere);
  void copy(void* to, const void* from, std::size_t bytes) const;
  const char* input_of(int member) const;
  char* output_of(int member) const;
  bool reads(int member) const;
  void finish();

  const Collective op_;
  const Boards& boards_;
  const std::uint32_t number_;
  const bool small_;
  Phase phase_ = Phase::kShow;
  int next_ = 0;             // the member that is waited for
  void* staged_ = nullptr;   // in the arena, when the tensor is not
};

}  // namespace lockstep::comm
