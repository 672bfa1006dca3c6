// The rank's end of the channel to bench/harness/benchmark_job.h.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// Receives requests from the harness and sends results. Used by one thread.
class HarnessChannel {
 public:
  /// Writes the pid of this process and opens the pipes. Blocks until the harness has opened its ends.
  HarnessChannel(const std::string& prefix, int rank);

  /// Blocks in read(2) until the next request; returns nullopt when the harness has closed the pipe or exited.
  std::optional<std::vector<std::int64_t>> next_request();
  /// Sends a result on rank 0; does nothing on other ranks.
  void send_result(const std::vector<double>& numbers);

 private:
  std::ifstream requests_;
  std::ofstream results_;
};

/// Return the rank of this process and the number of ranks, from the environment variables of `lockstep run`.
int own_rank();
int num_ranks();

/// Returns the seconds of a monotonic clock.
double now();

}  // namespace lockstep::bench
