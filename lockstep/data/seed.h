// Random numbers that can be had again.
#pragma once

#include <cstdint>

namespace lockstep::data {

/// Seeds libtorch's generators (all devices) and the C library's. Models made afterwards are equal on ranks that gave
/// equal seeds; DistributedDataParallel makes them equal without trusting that. For randomness that should differ
/// between ranks (dropout), give seed + rank after the model is made.
void seed_everything(std::uint64_t seed);

}  // namespace lockstep::data
