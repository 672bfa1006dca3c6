// The random numbers of a rank, as a part of a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/checkpoint/stateful.h"

namespace lockstep::train {

/// Of libtorch's generators, of the CPU and of `device`.
checkpoint::StateDict random_state(at::Device device);

/// The reverse. A generator that the state does not have stays as it is. Throws UsageError for a state that is none.
void load_random_state(const checkpoint::StateDict& state, at::Device device);

/// For a rank that the job before did not have: other numbers than those of the rank whose state this is, the same ones
/// each time.
void derive_random_state(const checkpoint::StateDict& state, std::uint64_t rank);

}  // namespace lockstep::train
