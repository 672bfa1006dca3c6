// Plans which gradients share a bucket, and measures how large buckets should be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/comm/channel/channel.h"

namespace lockstep::comm::reducers {

/// Duration of an all_reduce of `bytes` bytes.
struct BucketTime {
  std::int64_t bytes = 0;
  double seconds = 0;
};

/// Returns the smallest size whose rate (bytes per second) is at least 0.9 of the best one: a larger bucket would only
/// start later. `times` must be sorted by size. Pure.
std::int64_t choose_bucket_bytes(const std::vector<BucketTime>& times);

/// Times all_reduces of 256 KiB to 25 MiB on `device`, and stops after the first size that takes more than 0.2 s.
/// Returns bucket sizes for plan_buckets(), the same on all ranks. Rank 0 logs the measurements. All ranks must call
/// it; blocks until they have. Throws CommError.
std::vector<std::int64_t> measure_bucket_bytes(channel::Channel& channel, at::Device device);

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
