// What holds the memory of this host, for errors about a lack of memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::base::telemetry {

/// A process, or the files in a file system that is in memory.
struct MemoryUser {
  std::string name;         ///< "process 4711 (python3)" or "files in /dev/shm"
  std::uint64_t bytes = 0;  ///< without the memory that the ranks of this job share
};

/// Returns the processes and the file systems in memory (tmpfs) that use at least 1 MiB. With the directory of a
/// control group, only the processes in it; the file systems only if it is the root, because the kernel does not report
/// which group a file is counted in. Reads /proc and the directories of these file systems, which may take some 100 ms.
std::vector<MemoryUser> find_memory_users(const std::string& cgroup);

/// Returns the bytes of the memory that Lockstep shares between the ranks of this job on this host: arenas, and
/// parameters and states of fused optimizers.
std::uint64_t shared_bytes_of_job();

/// Returns the four largest users: "process 4711 (python3) 800 MiB, files in /dev/shm 300 MiB". Pure.
std::string describe_largest(std::vector<MemoryUser> users);

}  // namespace lockstep::base::telemetry
