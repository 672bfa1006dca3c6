// A rank's side of bench/harness/benchmark_job.h.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// The orders of this rank. Waits for the driver alone, in read(2); when the driver ends, so do the orders.
class HarnessChannel {
 public:
  HarnessChannel(const std::string& prefix, int rank);

  /// The next order; nothing when there are no more.
  std::optional<std::vector<std::int64_t>> next();
  /// Rank 0 tells the driver; the other ranks' numbers are not looked at.
  void answer(const std::vector<double>& numbers);

 private:
  std::ifstream orders_;
  std::ofstream answers_;
};

/// The number and count of this rank, as `lockstep run` gives them to any program.
int own_rank();
int num_ranks();

/// Seconds of a monotonic clock.
double now();

}  // namespace lockstep::bench
