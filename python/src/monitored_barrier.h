// The barrier that says who did not come.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace lockstep::python {

/// One call of monitored_barrier(): each rank writes a key, and rank 0 waits for all of them and writes the result. The
/// texts are those of c10d's Gloo, which programs search for.
struct MonitoredBarrier {
  c10d::Store& store;
  int rank;
  int size;
  std::string key;  ///< of this call, the same on all ranks

  /// Blocks until all ranks have come. Throws TimeoutError: on rank 0 after `timeout` with the first absent rank, or
  /// all of them if `wait_all_ranks`; on the others with rank 0's text, or when they have not heard of it for `timeout`
  /// as well.
  void run(std::chrono::milliseconds timeout, bool wait_all_ranks) const;

 private:
  void wait_as_rank_zero(std::chrono::milliseconds timeout, bool wait_all_ranks) const;
  void wait_for_result(std::chrono::milliseconds timeout) const;
  bool is_set(const std::string& name, std::chrono::milliseconds timeout) const;
  std::string key_of(int of_rank) const { return key + "/" + std::to_string(of_rank); }
};

}  // namespace lockstep::python
