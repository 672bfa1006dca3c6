// Random numbers of one sample in one epoch.
#pragma once

#include <cstdint>

#include "lockstep/data/splitmix64.h"

namespace lockstep::data {

/// SplitMix64 from a state that seed, epoch and sample choose: whoever makes the sample, on whatever machine and after
/// whatever else, draws the same numbers.
class SampleRng {
 public:
  SampleRng(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample)
      : state_(mix64(mix64(mix64(seed + kGoldenGamma) + epoch + kGoldenGamma) + sample + kGoldenGamma)) {}

  std::uint64_t next() { return mix64(state_ += kGoldenGamma); }
  /// low <= value < high.
  double uniform(double low, double high) { return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53); }
  /// 0 <= value < count, which is at least 1 and at most 2^31: all alike to one part in 2^32.
  int uniform_int(int count) { return static_cast<int>((next() >> 32) * static_cast<std::uint64_t>(count) >> 32); }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep::data
