// StragglerDetector: finds a rank that the other ranks repeatedly wait for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm::reducers {

struct Straggler {
  int rank = 0;
  double slowdown = 0;    ///< its time divided by the median of the ranks
  double wait_share = 0;  ///< fraction of their time that the other ranks wait for it
};

/// Receives, for each reduction, the time that each rank spent on its own. A window has at least 20 reductions and one
/// second of the slowest rank's time. A rank whose time is at least three times the median in three windows in a row is
/// reported once, and again only after a window in which it was faster.
class StragglerDetector {
 public:
  explicit StragglerDetector(int ranks);
  std::optional<Straggler> add(const std::vector<std::uint32_t>& work_us);

 private:
  std::vector<std::uint64_t> sums_;  // of this window, in microseconds
  std::vector<int> slow_windows_;    // in a row
  int num_reductions_ = 0;
};

/// Returns the WARN line that reports `straggler`; docs/reference/fatal-causes.md shows one.
std::string describe(const Straggler& straggler, int rank, int generation, std::int64_t step);

}  // namespace lockstep::comm::reducers
