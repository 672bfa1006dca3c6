// How busy a GPU is, from NVIDIA's management library (NVML), which the driver installs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::comm::gpu {

struct GpuUse {
  double busy = 0;                 ///< fraction of the driver's last sample period, up to 1 s, in which a kernel ran
  std::uint64_t memory_bytes = 0;  ///< in use on the GPU, by all processes
};

/// Reads the use of one GPU. Used by one thread.
class GpuMonitor {
 public:
  /// `uuid`: of describe_gpu(). Loads `library`; without it, or if it does not know the GPU, read() returns nothing.
  explicit GpuMonitor(const std::string& uuid, const char* library = "libnvidia-ml.so.1");
  /// Takes up to some milliseconds. nullopt if NVML does not answer, as for a part of a GPU (MIG).
  std::optional<GpuUse> read() const;

 private:
  void* library_ = nullptr;  // stays loaded
  void* device_ = nullptr;   // null: unknown
};

}  // namespace lockstep::comm::gpu
