// Plans which gradients share a bucket. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::comm::reducers {

struct GradientSize {
  std::int64_t bytes = 0;
  int kind = 0;  ///< gradients of different kinds (dtype, device) never share a bucket
};

/// Cuts `order` (indices into `gradients`, in the order in which backward() computes them) into buckets of at least
/// `caps` bytes: the first bucket of a kind is full at caps.front(), all others at caps.back(). A small first bucket
/// lets communication start early (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3). Buckets are sorted by
/// their last gradient, which is the order in which they become ready. Gradients keep their order inside a bucket.
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<GradientSize>& gradients,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps);

/// Merges the ranks' orders into one: rank 0's order, then the gradients that only later ranks have computed, in their
/// order. `orders[rank]` lists gradients.
std::vector<std::size_t> merge_orders(const std::vector<std::vector<std::size_t>>& orders, std::size_t num_gradients);

}  // namespace lockstep::comm::reducers
