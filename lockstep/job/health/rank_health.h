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
class StallTimer {
 public:
  using Clock = std::chrono::steady_clock;
  void sample(std::uint64_t count, Clock::time_point now) {
    if (now - last_sample_ > kMaxSampleGap) since_ += now - last_sample_;
    if (count != count_ || last_sample_ == Clock::time_point{}) since_ = now;
    count_ = count;
    last_sample_ = now;
  }
  std::chrono::milliseconds stalled_for(Clock::time_point now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
  }

 private:
  static constexpr std::chrono::seconds kMaxSampleGap{5};
  std::uint64_t count_ = 0;
  Clock::time_point since_{};
  Clock::time_point last_sample_{};
};

/// What an agent tells of a rank, about once a second.
struct RankHealth {
  int rank = -1;
  std::chrono::milliseconds since_heartbeat{0};  ///< since its last beat; 0 while a debugger holds it
  std::chrono::milliseconds since_progress{0};   ///< since its last progress
  bool is_in_world = true;   ///< others may wait for it: init() has returned, and its world has not ended
  char process_state = '?';  ///< of its process, as /proc shows it: R, S, D, T ...
};

struct HealthLimits {
  std::chrono::milliseconds stall{30000};  ///< without a beat; 0: for ever
  std::chrono::milliseconds hang{300000};  ///< without progress; 0: for ever
  bool judge_last_rank = false;            ///< the second one counts for a rank too that no other can wait for
};

/// Ranks that a job cannot go on with.
struct HangFinding {
  base::Cause cause = base::Cause::kInternal;
  std::vector<int> ranks;  ///< those that are silent, or all that do not get on
};

/// What the last pulses of all ranks of a job that show themselves say. kRankStalled: those silent for too long.
/// kRankStuck: of several ranks that are still in their world none has got on for too long; who is to blame their
/// operations tell. A rank that waits for one that gets on, however slowly, is not stuck; one that is alone, or the
/// last, holds nobody up, and is judged only if the limits say so. Pure.
std::optional<HangFinding> find_hang(const std::vector<RankHealth>& health, int world_size, const HealthLimits& limits);

}  // namespace lockstep::job
