// What agents have told of ranks while they lived.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/rank_page.h"
#include "lockstep/job/pulse.h"

namespace lockstep::launcher {

class Observed {
 public:
  Observed(int world_size, const job::PulseLimits& limits) : world_size_(world_size), limits_(limits) {}

  /// True when it is the first of a silence that is worth a warning.
  bool add(const job::Pulse& pulse);
  void add(base::RankSeen seen);
  /// The process of `rank` has.
  void ended(int rank) { pulses_.erase(rank); }

  std::optional<job::Finding> find_stuck() const;

  const std::map<int, job::Pulse>& pulses() const { return pulses_; }
  std::vector<base::RankSeen> ranks() const;
  /// "lockstep: where the ranks were:" and lines of it; empty when no operation is known.
  std::string text() const;

 private:
  const int world_size_;
  const job::PulseLimits limits_;
  std::map<int, job::Pulse> pulses_;      // of ranks that run; the last ones
  std::set<int> warned_;                  // of the silence of these
  std::map<int, base::RankSeen> flights_;
};

}  // namespace lockstep::launcher
