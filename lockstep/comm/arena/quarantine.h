// Keeps tensors alive whose memory must never be reused.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <utility>
#include <vector>

namespace lockstep::comm::arena {

/// Keeps `tensor` alive until the process exits. Call it for the tensors of an abandoned operation, because another
/// rank may still write to them. May be called from any thread.
inline void quarantine_tensor(at::Tensor tensor) {
  static std::mutex mutex;  // guards quarantined
  static auto* quarantined = new std::vector<at::Tensor>;
  const std::lock_guard lock(mutex);
  quarantined->push_back(std::move(tensor));
}

}  // namespace lockstep::comm::arena
