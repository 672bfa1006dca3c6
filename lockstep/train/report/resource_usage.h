// What this process uses of its host: memory, cores, the network and a GPU.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace lockstep::training::inline report {

/// Resource usage of this process.
struct ResourceUsage {
  double cpu_seconds = 0;                 ///< of all threads, since the start of the process
  std::uint64_t resident_bytes = 0;       ///< current memory, including shared pages
  std::uint64_t peak_resident_bytes = 0;  ///< maximum of resident_bytes

  /// Reads the current values from the kernel; takes about 10 us.
  static ResourceUsage now();
};

/// Counts what this process sends over TCP, whichever library has opened the connections. Connections within the host
/// do not count, nor do those that were opened and closed between two calls. Used by one thread.
class SentBytes {
 public:
  /// Returns the bytes that other hosts have acknowledged since the first call. Takes some microseconds for each open
  /// file of the process.
  std::uint64_t total();

 private:
  std::map<std::uint64_t, std::uint64_t> connections_;  // the bytes of each at the last call, by inode
  std::uint64_t total_ = 0;
  bool has_begun_ = false;
};

/// How busy a GPU is, from NVIDIA's management library (NVML), which the driver installs.
struct GpuUse {
  double busy = 0;                 ///< fraction of the driver's last sample period, up to 1 s, in which a kernel ran
  std::uint64_t memory_bytes = 0;  ///< in use on the GPU, by all processes
};

/// Reads the use of one GPU. Used by one thread.
class GpuMonitor {
 public:
  /// `uuid`: as CUDA has it, "GPU-...". Loads `library`; without it, or if it does not know the GPU, read() returns
  /// nothing.
  explicit GpuMonitor(const std::string& uuid, const char* library = "libnvidia-ml.so.1");
  /// Takes up to some milliseconds. nullopt if NVML does not answer, as for a part of a GPU (MIG).
  std::optional<GpuUse> read() const;

 private:
  void* library_ = nullptr;  // stays loaded
  void* device_ = nullptr;   // null: unknown
};

}  // namespace lockstep::training::inline report
