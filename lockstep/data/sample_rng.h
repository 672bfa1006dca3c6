// Random numbers of one sample in one epoch.
#pragma once

#include <cstdint>

#include "lockstep/data/splitmix64.h"

namespace lockstep::data {

/// SplitMix64 from a state that seed, epoch and sample choose: whoever makes the sample, on whatever machine and after
/// whatever else, draws the same numbers.
class SampleRandom {
 public:
  SampleRandom(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample)
      : state_(mix(mix(mix(seed + kGolden) + epoch + kGolden) + sample + kGolden)) {}

  std::uint64_t next() { return mix(state_ += kGolden); }
  /// low <= value < high.
  double between(double low, double high) { return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53); }
  /// 0 <= value < count, which is at least 1 and at most 2^31: all alike to one part in 2^32.
  int below(int count) { return static_cast<int>((next() >> 32) * static_cast<std::uint64_t>(count) >> 32); }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep::data
