// Keeps memory alive that must never be reused.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::comm {

/// Keeps `tensor` alive until the process exits. For a tensor of an abandoned operation, to which another rank may
/// still write. May be called from any thread.
void quarantine_tensor(at::Tensor tensor);

}  // namespace lockstep::comm
