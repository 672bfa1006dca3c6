// Measures the CPU time and the memory of processes, and whether a process and its descendants work: whether they use
// CPU time, or move bytes.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/base/proc_stat.h"

namespace lockstep::launcher::process {

/// The counters of one process, from /proc.
struct ProcessCounters {
  pid_t parent = 0;
  std::chrono::milliseconds cpu_time{0};  ///< also of its children that have ended
};

/// Returns the counters of all processes of this host. Takes about 10 us for each.
std::map<pid_t, ProcessCounters> read_processes();

/// The counters of all processes of this host, and of all its TCP connections.
struct HostActivity {
  std::map<pid_t, ProcessCounters> processes;
  /// Bytes received and acknowledged, by the inode of the socket. Empty if the kernel does not tell.
  std::map<std::uint32_t, std::uint64_t> connections;
};
/// Takes about 1 us for each connection beside the time of read_processes().
HostActivity read_activity();

/// The descendants of `root`, and `root` itself. Pure.
std::vector<pid_t> tree_of(pid_t root, const std::map<pid_t, ProcessCounters>& all);

/// What a process and its descendants have used so far.
struct Usage {
  std::chrono::milliseconds cpu_time{0};
  std::uint64_t bytes = 0;  ///< read and written, also those of disks by mapped files, and those of TCP connections
};
/// Sums up the counters of `root` and its descendants, without those of Lockstep's own threads (base/thread.h). A
/// process whose files cannot be read counts with its CPU time only.
Usage usage_of_tree(pid_t root, const HostActivity& all);

/// A process that has used this much CPU time in a second works: a twentieth of a core.
inline constexpr std::chrono::milliseconds kWorkingCpuTime{50};
/// So does one that has moved this many bytes in a second.
inline constexpr std::uint64_t kWorkingBytes = 4096;

/// A process that has used this much CPU time since the last sample, a second ago, is active. Threads that only look
/// for something once per second, such as those of the hook, use less.
inline constexpr std::chrono::milliseconds kActiveCpuTime{20};

/// Returns whether the process worked between two samples `elapsed` apart. Counters of processes that have ended
/// without being reaped by their parent are lost; a sum that shrinks counts as no work. Pure.
bool has_worked(const Usage& before, const Usage& now, std::chrono::milliseconds elapsed);

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
