// Which rank do the others wait for, again and again?
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

struct Straggler {
  int rank = 0;
  double slowdown = 0;    ///< as long as the median of the ranks
  double wait_share = 0;  ///< of their time the others wait for it
};

/// Fed with the time that each rank took by itself for one exchange. Windows are of 20 exchanges and at least a second
/// of the slowest rank. A rank whose time in each of three windows in a row is three times the median is reported once,
/// and again only after a window in which it was not so.
class StragglerDetector {
 public:
  explicit StragglerDetector(int ranks);
  std::optional<Straggler> add(const std::vector<std::uint32_t>& work_us);

 private:
  std::vector<std::uint64_t> sums_;  // of this window, microseconds
  std::vector<int> slow_windows_;    // in a row
  int exchanges_ = 0;
};

/// A WARN line without "WARN": docs/04.
std::string describe(const Straggler& straggler, int rank, int generation, std::int64_t step);

}  // namespace lockstep::comm
