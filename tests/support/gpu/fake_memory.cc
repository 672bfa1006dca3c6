// The functions of the fake CUDA runtime that allocate memory or describe it.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/support/gpu/fake_gpu.h"
#include "tests/support/gpu/memory.h"

namespace fake_gpu {
namespace {

struct Allocation {
  std::size_t bytes;
  MemoryKind memory_kind;
  int device;
};

/// By address; guarded by mutex(). Never destroyed, because the threads of streams outlive main().
std::map<std::uintptr_t, Allocation>& allocations() {
  static auto& all = *new std::map<std::uintptr_t, Allocation>;
  return all;
}

std::size_t device_bytes_in_use() {
  const std::lock_guard lock(mutex());
  std::size_t bytes = 0;
  for (const auto& [address, allocation] : allocations())
    if (allocation.memory_kind == MemoryKind::kDevice && allocation.device == current_device())
      bytes += allocation.bytes;
  return bytes;
}

void add_allocation(void* address, std::size_t bytes, MemoryKind kind) {
  const std::lock_guard lock(mutex());
  allocations()[reinterpret_cast<std::uintptr_t>(address)] = {bytes, kind, current_device()};
}

void remove_allocation(void* address) {
  const std::lock_guard lock(mutex());
  allocations().erase(reinterpret_cast<std::uintptr_t>(address));
}

cudaError_t allocate(void** address, std::size_t bytes, MemoryKind kind) {
  if (kind == MemoryKind::kDevice && bytes > kDeviceBytes - device_bytes_in_use())
    return fail(cudaErrorMemoryAllocation);
  *address = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  // Uninitialised memory is not zero.
  std::memset(*address, 0x7b, bytes);
  add_allocation(*address, bytes, kind);
  return cudaSuccess;
}

}  // namespace

MemoryKind memory_kind(const void* address, int* device) {
  const std::lock_guard lock(mutex());
  auto at = allocations().upper_bound(reinterpret_cast<std::uintptr_t>(address));
  if (at == allocations().begin()) return MemoryKind::kPageable;
  --at;
  if (reinterpret_cast<std::uintptr_t>(address) >= at->first + at->second.bytes) return MemoryKind::kPageable;
  if (device) *device = at->second.device;
  return at->second.memory_kind;
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  cudaError_t error{};
  if (injected_error("cudaMalloc", error)) return error;
  return allocate(address, bytes, MemoryKind::kDevice);
}
cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  cudaDeviceSynchronize();
  remove_allocation(address);
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
  return allocate(address, bytes, MemoryKind::kPinned);
}
cudaError_t cudaFreeHost(void* address) {
  remove_allocation(address);
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  add_allocation(address, bytes, MemoryKind::kPinned);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  remove_allocation(address);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *total = kDeviceBytes;
  *free = kDeviceBytes - device_bytes_in_use();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof *attributes);
  const MemoryKind kind = memory_kind(address, &attributes->device);
  attributes->type = kind == MemoryKind::kDevice   ? cudaMemoryTypeDevice
                     : kind == MemoryKind::kPinned ? cudaMemoryTypeHost
                                                   : cudaMemoryTypeUnregistered;
  if (kind == MemoryKind::kDevice) attributes->devicePointer = const_cast<void*>(address);
  if (kind == MemoryKind::kPinned) attributes->hostPointer = attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}

}  // extern "C"
