// How large buckets should be on this wire.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/channel/channel.h"

namespace lockstep::comm {

/// How long an all_reduce of so many bytes takes.
struct BucketTime {
  std::int64_t bytes = 0;
  double seconds = 0;
};

/// The smallest size that moves bytes at no less than 0.9 of the best rate: a larger one would only leave later. Pure;
/// `times` ascend.
std::int64_t choose_bucket_bytes(const std::vector<BucketTime>& times);

/// Times all_reduces of 256 KiB to 25 MiB, fewer when one takes more than 0.2 s, and returns bucket sizes as
/// plan_buckets() takes them, the same on all ranks. Tensors are on `device`. Rank 0 prints what it saw. All ranks call
/// it; waits for them. Throws CommError.
std::vector<std::int64_t> measure_bucket_bytes(Channel& channel, at::Device device);

}  // namespace lockstep::comm
