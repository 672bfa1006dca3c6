// Kernels of libtorch that a pretended GPU knows: element by element, of contiguous tensors.
#pragma once

#include <functional>
#include <string>

namespace fake_gpu {

/// What a launch of `name` (mangled) with `arguments` does, its arguments read; empty for a kernel that is not known.
std::function<void()> kernel(const std::string& name, void** arguments);

}  // namespace fake_gpu
