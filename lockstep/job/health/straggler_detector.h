// StragglerDetector: finds a rank that the other ranks repeatedly wait for.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/job/fatal.h"

namespace lockstep::job::health {

struct Straggler {
  int rank = 0;
  double slowdown = 0;    ///< its time divided by the median of the ranks
  double wait_share = 0;  ///< fraction of their time that the other ranks wait for it
};

/// Reports a rank whose own time is at least three times the median in three windows in a row: once, and again only
/// after a window in which it was faster.
class StragglerDetector {
 public:
  explicit StragglerDetector(int ranks);
  /// Adds the time that each rank spent on its own in one reduction. A window has at least 20 reductions and one second
  /// of the slowest rank's time.
  std::optional<Straggler> add(const std::vector<std::uint32_t>& work_us);
  /// Adds a window. `work` is the time that each rank spent on its own in it, in any unit.
  std::optional<Straggler> add_window(const std::vector<std::uint64_t>& work);

 private:
  std::vector<std::uint64_t> sums_;  // of this window, in microseconds
  std::vector<int> slow_windows_;    // in a row
  int num_reductions_ = 0;
};

/// Returns the warning about `straggler`, without generation, step, host and pid; docs/reference/fatal-causes.md shows
/// one.
Fatal warning_of(const Straggler& straggler, int rank);

}  // namespace lockstep::job::health
