// A GPU that is none: streams, events, memory and a few kernels, as the CUDA runtime shows them, on the host. What is
// put on a stream is done by a thread of the stream, so that what nobody ordered comes in another order. Shared by
// fake_cuda.cc and fake_nccl.cc, which make one library that is loaded before the real ones (LD_PRELOAD).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

namespace fake_gpu {

/// Guards everything; said whenever anything has changed.
std::mutex& mutex();
std::condition_variable& state_changed();

/// `task` is done when all that was put on `stream` before is. Nullptr is the default stream of the current device.
void enqueue(void* stream, std::function<void()> task);

/// The device of this thread, as the runtime counts; and which one that is on the host, by CUDA_VISIBLE_DEVICES.
int current_device();
int host_device_index(int device);

/// A variable, "" when it is not set.
std::string env_variable(const char* name);

}  // namespace fake_gpu
