// Which gradients travel together. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::comm {

struct GradientSize {
  std::int64_t bytes = 0;
  int kind = 0;  ///< parts of different dtype or device never share a bucket
};

/// Cuts `order` (indices into `parts`, in the order in which gradients are born) into buckets of at least `caps` bytes:
/// the first bucket of a kind is full at caps.front(), all others at caps.back(). A small first bucket lets
/// communication start early (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3). Buckets come in the order of
/// their last part: the order in which they become ready. Parts keep their order inside a bucket.
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<GradientSize>& parts,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps);

/// One order out of the ranks': rank 0's, then what only later ranks have seen, in theirs. `orders[rank]` lists parts.
std::vector<std::size_t> merge_orders(const std::vector<std::vector<std::size_t>>& orders, std::size_t num_gradients);

}  // namespace lockstep::comm
