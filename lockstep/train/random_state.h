// The random number generators of a rank, as a part of a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/checkpoint/stateful.h"

namespace lockstep::training {

/// Returns the state of libtorch's default generators of the CPU and of `device`.
checkpoint::StateDict random_state(at::Device device);

/// Restores that state. A generator that the state does not contain is not changed. Throws UsageError for an invalid
/// state.
void load_random_state(const checkpoint::StateDict& state, at::Device device);

/// Seeds the generators of a rank that did not exist in the previous job. The result is a function of `state` and
/// `rank`, and differs from the state of the rank that saved `state`.
void derive_random_state(const checkpoint::StateDict& state, std::uint64_t rank);

}  // namespace lockstep::training
