// What the host and the control groups of this process leave to it: memory, and time of CPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::base {

/// Returns the content of a file, or nullopt.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// The memory left to this process, and what limits it.
struct HostMemory {
  std::uint64_t available_bytes = 0;  ///< the minimum of what the host and this process's control groups have left
  std::string cgroup;                 ///< directory of the control group that sets the minimum; empty if the host does
  std::uint64_t limit_bytes = 0;      ///< of which available_bytes are left
  std::string limit_source;           ///< where limit_bytes was read: a file of `cgroup`, or a file and its entry

  /// Returns "the host" or "the control group DIRECTORY", for messages.
  std::string limited_by() const { return cgroup.empty() ? "the host" : "the control group " + cgroup; }
  /// Returns "the host has 3 MiB of 64 MiB left (/proc/meminfo, MemTotal)", or the same for a control
  /// group; "the limit is unknown" without a readable file.
  std::string describe() const;

  /// Reads MemAvailable from /proc/meminfo, and the limit and the usage of this process's control group and its
  /// ancestors: memory.max and memory.current of version 2, memory.limit_in_bytes and memory.usage_in_bytes of version
  /// 1. In a container, these files are at the root of /sys/fs/cgroup. As in MemAvailable, cached file contents count
  /// as available, because the kernel drops them when memory is needed. If the kernel does not overcommit memory
  /// (vm.overcommit_memory is 2), what is left of CommitLimit counts as well. Takes about 150 us. A file that cannot be
  /// read imposes no limit.
  static HostMemory now();
  /// Like now(), but calls `read`, which returns the content of a file, to read each file. For tests.
  static HostMemory from(const ReadFile& read);
};

/// Returns how many CPUs' time the quotas of this process's control group and of its ancestors grant: the least of
/// cpu.max of version 2, and of cpu.cfs_quota_us and cpu.cfs_period_us of version 1; infinity without a quota. `read`
/// is for tests.
double cpu_quota(const ReadFile& read);
double cpu_quota();

/// Returns `bytes` rounded down to mebibytes, "64 MiB", or to kibibytes if there are less: "512 KiB".
std::string memory_text(std::uint64_t bytes);

}  // namespace lockstep::base
