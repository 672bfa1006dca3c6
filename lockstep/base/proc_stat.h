// What the kernel says of a process, or of a thread, in /proc/PID/stat.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::base {

struct ProcStat {
  std::string name;  ///< at most 15 bytes, of any kind
  char state = '?';  ///< 'R', 'S', 'D', 'T', 'Z', ...; see proc(5)
  pid_t parent = 0;
  std::chrono::milliseconds cpu_time{0};
  std::chrono::milliseconds children_cpu_time{0};  ///< of children that have ended
  std::uint64_t resident_bytes = 0;
};

/// Returns nothing if there is no such process. A zombie is one: it may have running threads, or it will soon be
/// reaped.
std::optional<ProcStat> read_proc_stat(pid_t pid);
/// Of a file such as "/proc/7/task/8/stat".
std::optional<ProcStat> read_proc_stat(const std::string& path);

}  // namespace lockstep::base
