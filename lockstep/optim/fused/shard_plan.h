// Plans which owner holds the state of which elements.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::optim::inline fused {

/// Allocations and shards begin on a cache line.
constexpr std::size_t kCacheLineBytes = 64;

/// A range of adjacent elements of a parameter.
struct ElementRange {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// The size of one state tensor of a parameter.
struct StateSize {
  std::size_t elements = 0;
  std::size_t bytes_each = 0;
};

/// Divides the concatenated state of all parameters into `num_owners` intervals of the same number of bytes, rounded to
/// cache lines, and returns the range of each parameter that belongs to `owner`. Pure.
std::vector<ElementRange> plan_shard(const std::vector<StateSize>& parameters, int owner, int num_owners);

}  // namespace lockstep::optim::inline fused
