// Detects ranks that have stalled or hang, from samples of the counters in their pages.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/cause.h"
#include "lockstep/base/timeouts.h"

namespace lockstep::job::health {

/// Measures for how long a counter has not changed, from samples taken about once per second. The time starts with the
/// first sample. Gaps of more than 5 s between samples do not count, because the sampling process itself was suspended.
class StallTimer {
 public:
  using Clock = std::chrono::steady_clock;
  void sample(std::uint64_t count, Clock::time_point now) {
    if (now - last_sample_ > base::kMaxSampleGap) since_ += now - last_sample_;
    if (count != count_ || last_sample_ == Clock::time_point{}) since_ = now;
    count_ = count;
    last_sample_ = now;
  }
  std::chrono::milliseconds stalled_for(Clock::time_point now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - since_);
  }

 private:
  std::uint64_t count_ = 0;
  Clock::time_point since_{};
  Clock::time_point last_sample_{};
};

/// Where a rank is between its start and its end.
enum class RankPhase : std::uint8_t {
  kBeforeWorld,  ///< it has not joined a world; perhaps it never will, because the program has none
  kInWorld,      ///< init() has returned and the rank has not left, so other ranks may wait for it
  kAfterWorld,   ///< it has left its world, and its process has not ended
};

/// The health of one rank, which its agent reports about once per second.
struct RankHealth {
  int rank = -1;
  std::chrono::milliseconds since_heartbeat{0};  ///< 0 while a debugger has stopped the process
  std::chrono::milliseconds since_progress{0};   ///< reported by the program, or work that the agent has seen
  RankPhase phase = RankPhase::kInWorld;
  char process_state = '?';                     ///< state of its process in /proc: R, S, D, T ...
  std::chrono::milliseconds since_report{0};    ///< since_progress without the work that the agent has seen
  std::chrono::milliseconds since_activity{0};  ///< use of CPU time by any of its processes; 0 if it is not measured
  bool is_waiting = false;                      ///< blocked on another rank
  std::int64_t steps = 0;                       ///< of the program
  std::int64_t looks = 0;                       ///< RankPage::looks; 0 if the rank is not watched from outside
  std::int64_t pending_looks = 0;
};

struct HealthLimits {
  std::chrono::milliseconds stall{30000};                  ///< maximum time without a heartbeat; 0 disables the check
  std::chrono::milliseconds hang = base::kDefaultTimeout;  ///< maximum time without progress; 0 disables the check
  /// Maximum time in which a rank works without reporting progress while another rank waits; 0 disables the check.
  std::chrono::milliseconds work{1800000};
  /// Maximum time in which no process of any rank uses CPU time; 0 disables the check.
  std::chrono::milliseconds idle{0};
  bool judge_last_rank = false;  ///< apply `hang` also to a rank for which no other rank can wait
  bool judge_last_work = false;  ///< the same for `work`
};

/// Which limit of HealthLimits was exceeded.
enum class HangKind { kStall, kHang, kWork, kIdle };

/// A hang, and the ranks that prevent the job from continuing.
struct HangFinding {
  HangKind kind = HangKind::kHang;
  std::vector<int> ranks;  ///< the stalled ranks; all ranks without progress; those that work for too long

  base::Cause cause() const { return kind == HangKind::kStall ? base::Cause::kRankStalled : base::Cause::kRankStuck; }
};

/// Checks the latest health of all running ranks. Returns kStall with the ranks that have had no heartbeat for
/// `limits.stall`. Otherwise returns kHang with all ranks in the world if none of them has made progress for
/// `limits.hang`; culprit_ranks() then finds the culprits. So ranks that wait for a slow rank are not stuck as long as
/// that rank makes progress, or works; but if it works for `limits.work` without reporting progress while another rank
/// waits, returns kWork with it. A rank that has not joined its world counts like the others while one of these waits.
/// Ranks that have left their world are judged by both limits once no rank is in it. Returns kIdle if no process of any
/// rank has used CPU time for `limits.idle`, and nullopt in all other cases. A rank that is alone or the last in its
/// world blocks no other rank; its progress is checked only if `limits.judge_last_rank` is set. Pure.
std::optional<HangFinding> find_hang(const std::vector<RankHealth>& health, int world_size, const HealthLimits& limits);

}  // namespace lockstep::job::health
