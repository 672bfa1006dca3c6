// Measures the CPU time and the memory of a process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "lockstep/base/proc_stat.h"

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
inline ProcessSample sample_process(pid_t pid) {
  ProcessSample sample{.pid = pid, .taken = std::chrono::steady_clock::now()};
  if (const auto stat = base::read_proc_stat(pid)) {
    sample.state = stat->state;
    sample.cpu_time = stat->cpu_time;
    sample.resident_bytes = stat->resident_bytes;
  }
  return sample;
}

/// Returns the CPU time that the process used between two samples, in percent of one core: 200 means two cores. Returns
/// nullopt if the samples are of different processes, or less than 0.2 s apart. Pure.
inline std::optional<int> cpu_percent(const ProcessSample& from, const ProcessSample& to) {
  constexpr std::chrono::milliseconds kMinInterval(200);  // the kernel counts in units of 10 ms
  if (from.pid != to.pid || to.taken < from.taken + kMinInterval || to.cpu_time < from.cpu_time) return std::nullopt;
  const std::chrono::duration<double, std::milli> used = to.cpu_time - from.cpu_time, elapsed = to.taken - from.taken;
  return static_cast<int>(100 * used / elapsed + 0.5);
}

}  // namespace lockstep::launcher::process
