// Memory that must never serve anything else.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::comm {

/// For tensors that another rank may still write to, because an operation on them was given up: they live as long as
/// the process.
void quarantine_tensor(at::Tensor tensor);

}  // namespace lockstep::comm
