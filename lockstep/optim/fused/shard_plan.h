// Which owner keeps the state of which elements.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::optim {

/// Neighbouring elements of a parameter.
struct ElementRange {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// What a parameter needs of one tensor of state.
struct StateSize {
  std::size_t elements = 0;
  std::size_t bytes_each = 0;
};

/// All parameters' state, one after the other, is cut into `num_owners` intervals of equally many bytes, as far as
/// whole cache lines allow. What `owner` has of each parameter.
std::vector<ElementRange> plan_shard(const std::vector<StateSize>& parameters, int owner, int num_owners);

}  // namespace lockstep::optim
