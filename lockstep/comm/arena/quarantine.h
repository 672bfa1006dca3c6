// Keeps tensors alive whose memory must never be reused.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::comm::arena {

/// Keeps `tensor` alive until the process exits. Call it for the tensors of an abandoned operation, because another
/// rank may still write to them. May be called from any thread.
void quarantine_tensor(at::Tensor tensor);

}  // namespace lockstep::comm::arena
