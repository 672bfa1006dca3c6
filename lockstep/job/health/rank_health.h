// Is a rank still there, and does it get on? Judged from outside, by looks at its page.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/cause.h"

namespace lockstep::job {

/// How long something has stood still, from looks at its count, about once a second. The first look begins it. Time in
/// which nobody looked does not count: then whoever looks stood still as well.
class StandingStill {
 public:
  using Clock = std::chrono::steady_clock;
  void look(std::uint64_t count, Clock::time_point now) {
    if (now - looked_ > kLooksAreDue) since_ += now - looked_;
    if (count != count_ || looked_ == Clock::time_point{}) since_ = now;
    count_ = count;
    looked_ = now;
  }
  std::chrono::milliseconds lasts(Clock::time_point now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
  }

 private:
  static constexpr std::chrono::seconds kLooksAreDue{5};
  std::uint64_t count_ = 0;
  Clock::time_point since_{};
  Clock::time_point looked_{};
};

/// What an agent tells of a rank, about once a second.
struct Pulse {
  int rank = -1;
  std::chrono::milliseconds silent{0};  ///< since its last beat; 0 while a debugger holds it
  std::chrono::milliseconds idle{0};    ///< since its last progress
  bool in_world = true;                 ///< others may wait for it: init() has returned, and its world has not ended
  char state = '?';                     ///< of its process, as /proc shows it: R, S, D, T ...
};

struct PulseLimits {
  std::chrono::milliseconds stall{30000};  ///< without a beat; 0: for ever
  std::chrono::milliseconds hang{300000};  ///< without progress; 0: for ever
  bool also_alone = false;                 ///< the second one counts for a rank too that no other can wait for
};

/// Ranks that a job cannot go on with.
struct Finding {
  base::Cause cause = base::Cause::kInternal;
  std::vector<int> ranks;  ///< those that are silent, or all that do not get on
};

/// What the last pulses of all ranks of a job that show themselves say. kRankStalled: those silent for too long.
/// kRankStuck: of several ranks that are still in their world none has got on for too long; who is to blame their
/// operations tell. A rank that waits for one that gets on, however slowly, is not stuck; one that is alone, or the
/// last, holds nobody up, and is judged only if the limits say so. Pure.
std::optional<Finding> find_stuck(const std::vector<Pulse>& pulses, int world_size, const PulseLimits& limits);

}  // namespace lockstep::job
