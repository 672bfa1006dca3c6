// Measures whether a process and its descendants work: whether they use CPU time, or move bytes.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <vector>

namespace lockstep::launcher::process {

/// The counters of one process, from /proc.
struct ProcessCounters {
  pid_t parent = 0;
  std::chrono::milliseconds cpu_time{0};  ///< also of its children that have ended
};

/// The counters of all processes of this host, and of all its TCP connections.
struct HostActivity {
  std::map<pid_t, ProcessCounters> processes;
  /// Bytes received and acknowledged, by the inode of the socket. Empty if the kernel does not tell.
  std::map<std::uint32_t, std::uint64_t> connections;
};
/// Takes about 10 us for each process, and 1 us for each connection.
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

}  // namespace lockstep::launcher::process
