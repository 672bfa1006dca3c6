// The barrier that says who did not come.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/job/store.h"

namespace lockstep::python {

/// One call of monitored_barrier(): each rank writes a key, and rank 0 waits for all of them, writes the result, and
/// removes the keys of the call before, which all have left. The texts are those of c10d's Gloo, which programs search
/// for.
struct MonitoredBarrier {
  job::Store& store;  ///< that ends with the job; not torch's, which every process on the network may write
  int rank;
  int size;
  std::int64_t number;  ///< of this call in the group, from 1, the same on all ranks

  /// Blocks until all ranks have come. Throws TimeoutError: on rank 0 after `timeout` with the first absent rank, or
  /// all of them if `wait_all_ranks`; on the others with rank 0's text, or when they have not heard of it for `timeout`
  /// as well.
  void run(std::chrono::milliseconds timeout, bool wait_all_ranks) const;

 private:
  void wait_as_rank_zero(std::chrono::milliseconds timeout, bool wait_all_ranks) const;
  void wait_for_result(std::chrono::milliseconds timeout) const;
  std::optional<std::string> wait_for(const std::string& name, std::chrono::milliseconds timeout) const;
  void forget_last_call() const;
  std::string key_of(int of_rank, std::int64_t call) const;
};

}  // namespace lockstep::python
