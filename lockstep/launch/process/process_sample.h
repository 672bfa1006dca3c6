// Measures the CPU time and the memory of a process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace lockstep::launcher::process {

/// The counters of a process at one time.
struct ProcessSample {
  pid_t pid = -1;
  char state = '?';                       ///< such as R, S, D or T; '?' if there is no such process
  std::chrono::milliseconds cpu_time{0};  ///< of all its threads since its start, in steps of 10 ms
  std::uint64_t resident_bytes = 0;       ///< including shared memory that it has touched
  std::chrono::steady_clock::time_point taken;
};

/// Reads the counters of `pid` from /proc.
ProcessSample sample_process(pid_t pid);

/// Returns the CPU time that the process used between two samples, in percent of one core: 200 means two cores. Returns
/// nullopt if the samples are of different processes, or less than 0.2 s apart. Pure.
std::optional<int> cpu_percent(const ProcessSample& from, const ProcessSample& to);

}  // namespace lockstep::launcher::process
