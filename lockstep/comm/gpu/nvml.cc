#include "lockstep/comm/gpu/nvml.h"

#include <dlfcn.h>

namespace lockstep::comm::gpu {
namespace {

// As in nvml.h, which does not change them.
struct Utilization {
  unsigned gpu, memory;  // percent of time
};
struct Memory {
  unsigned long long total, free, used;
};

/// Calls a function of NVML; returns whether it exists and succeeded.
template <typename... Args>
bool call(void* library, const char* name, Args... args) {
  auto* const function = library ? reinterpret_cast<int (*)(Args...)>(::dlsym(library, name)) : nullptr;
  return function && function(args...) == 0;
}

}  // namespace

GpuMonitor::GpuMonitor(const std::string& uuid, const char* library)
    : library_(::dlopen(library, RTLD_LAZY | RTLD_LOCAL)) {
  if (!call(library_, "nvmlInit_v2") || !call(library_, "nvmlDeviceGetHandleByUUID", uuid.c_str(), &device_))
    device_ = nullptr;
}

std::optional<GpuUse> GpuMonitor::read() const {
  Utilization use{};
  Memory memory{};
  if (!device_ || !call(library_, "nvmlDeviceGetUtilizationRates", device_, &use) ||
      !call(library_, "nvmlDeviceGetMemoryInfo", device_, &memory))
    return std::nullopt;
  return GpuUse{use.gpu / 100.0, memory.used};
}

}  // namespace lockstep::comm::gpu
