// The kernels of libtorch that the fake GPU implements: elementwise kernels on contiguous tensors, and those on lists
// of tensors that Adam needs.
#pragma once

#include <functional>
#include <string>

namespace fake_gpu {

/// Returns a task that executes the kernel with the mangled name `name` on a grid of `blocks` blocks. Reads `arguments`
/// before it returns. Returns an empty function for an unknown kernel.
std::function<void()> make_kernel_task(const std::string& name, unsigned blocks, void** arguments);

}  // namespace fake_gpu
