// The pure function that divides optimizer state between owners.
#include "lockstep/optim/fused/shard_plan.h"

#include <algorithm>

namespace lockstep::optim::inline fused {
namespace {

/// The number of elements before byte `cut` of a parameter whose state begins at byte `begin`, rounded down to a whole
/// cache line.
std::size_t elements_before(const StateSize& parameter, std::size_t begin, std::size_t cut) {
  if (cut <= begin) return 0;
  const std::size_t elements_per_line = std::max<std::size_t>(1, kCacheLineBytes / parameter.bytes_each);
  const std::size_t elements = (cut - begin) / parameter.bytes_each;
  return elements >= parameter.elements ? parameter.elements : elements / elements_per_line * elements_per_line;
}

}  // namespace

std::vector<ElementRange> plan_shard(const std::vector<StateSize>& parameters, int owner, int num_owners) {
  std::size_t all = 0;
  for (const StateSize& parameter : parameters) all += parameter.elements * parameter.bytes_each;
  const auto owners = static_cast<std::size_t>(num_owners), self = static_cast<std::size_t>(owner);
  // all * k / owners would overflow. The last interval ends at `all`.
  const auto cut = [&](std::size_t k) { return k == owners ? all : all / owners * k + all % owners * k / owners; };
  std::vector<ElementRange> ranges;
  std::size_t begin = 0;
  for (const StateSize& parameter : parameters) {
    const std::size_t first = elements_before(parameter, begin, cut(self));
    ranges.push_back({first, elements_before(parameter, begin, cut(self + 1)) - first});
    begin += parameter.elements * parameter.bytes_each;
  }
  return ranges;
}

}  // namespace lockstep::optim::inline fused
