// Seeds the random number generators of the process.
#pragma once

#include <cstdint>

namespace lockstep::data {

/// Seeds libtorch's generators (all devices) and the C library's. Models that are created afterwards are equal on ranks
/// that passed equal seeds; DistributedDataParallel makes them equal in any case. For randomness that should differ
/// between ranks (dropout), pass seed + rank after the model is created.
void seed_everything(std::uint64_t seed);

}  // namespace lockstep::data
