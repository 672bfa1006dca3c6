// A fake GPU on the host: streams, events, memory and a few kernels, behind the API of the CUDA runtime. Each stream
// has a thread that executes its tasks, so that tasks of different streams without an explicit order can run in any
// order. The sources that share this header are linked into one library that is loaded before the real ones
// (LD_PRELOAD).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

namespace fake_gpu {

/// The mutex that guards all state of the fake GPU.
std::mutex& mutex();
/// Notified whenever any of that state has changed.
std::condition_variable& state_changed();

/// Runs `task` on `stream` after all tasks that were enqueued before. Nullptr is the default stream of the current
/// device. Does not block.
void enqueue(void* stream, std::function<void()> task);

/// current_device() returns the device of this thread, as the runtime numbers devices; host_device_index() returns the
/// number of that device on the host, according to CUDA_VISIBLE_DEVICES.
int current_device();
int host_device_index(int device);

/// Returns an environment variable, or "" if it is not set.
std::string env_variable(const char* name);

}  // namespace fake_gpu
