// Memory of the fake GPU, and the errors that its functions return.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fake_gpu {

constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;  // of each device

enum class MemoryKind { kPageable, kPinned, kDevice };

/// Returns what kind of memory an address belongs to, and the device on which it was allocated.
MemoryKind memory_kind(const void* address, int* device = nullptr);

/// Returns `error`, which becomes this thread's last error.
cudaError_t fail(cudaError_t error);

/// Implements FAKE_CUDA_ERROR: for "cudaMalloc:2" every call of cudaMalloc fails with error 2.
bool injected_error(const char* call, cudaError_t& error);

}  // namespace fake_gpu
