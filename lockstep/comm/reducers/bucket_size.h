// Measures the best bucket size for a channel.
#pragma once

#include <cstdint>
#include <string>
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

}  // namespace lockstep::comm::reducers
