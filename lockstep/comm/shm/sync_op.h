// Something that the ranks of a host do together.
#pragma once

#include <cstdint>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {

/// Shows this rank's data, waits until all have, does this rank's share of the work, and waits until all have done
/// theirs. Advanced by one thread at a time.
class Meeting {
 public:
  Meeting(const Boards& boards, std::uint32_t number) : boards_(boards), number_(number) {}
  virtual ~Meeting() = default;
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  /// Does what can be done until `deadline`. True when it is finished. Throws when a member that is waited for has
  /// died, and ArenaFull.
  bool advance(base::Deadline deadline);
  /// The same, as long as others come while this spins.
  bool advance_quickly();

 protected:
  /// Writes what the others read.
  virtual void show() = 0;
  /// All have shown theirs.
  virtual void work() = 0;
  /// All have done their work.
  virtual void finish() = 0;
  /// Nobody reads what another rank could change after work(): then there is no need to wait for each other again.
  virtual bool ends_with_work() const = 0;

  /// Others may be at this rank's data: it has been shown, and not all have done their work.
  bool exposed() const { return phase_ == Phase::kMeet || phase_ == Phase::kPart; }

  const Boards& boards_;
  const std::uint32_t number_;

 private:
  enum class Phase { kShow, kMeet, kPart, kFinished };
  template <typename Wait>
  bool step(const Wait& wait);

  Phase phase_ = Phase::kShow;
  int next_ = 0;  // the member that is waited for
};

}  // namespace lockstep::comm
