// The kernels of libtorch that the fake GPU implements: elementwise kernels on contiguous tensors.
#pragma once

#include <functional>
#include <string>

namespace fake_gpu {

/// Returns a task that executes the kernel with the mangled name `name`. Reads `arguments` before it returns. Returns
/// an empty function for an unknown kernel.
std::function<void()> make_kernel_task(const std::string& name, void** arguments);

}  // namespace fake_gpu
