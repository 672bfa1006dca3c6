// A random number generator for one sample in one epoch, and the mixing function of all random numbers in data/.
#pragma once

#include <cstdint>

namespace lockstep::data {

inline constexpr std::uint64_t kGoldenGamma = 0x9e3779b97f4a7c15ULL;

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// SplitMix64, seeded with seed, epoch and sample. The numbers therefore do not depend on the thread, the machine or
/// the order in which samples are made.
class SampleRng {
 public:
  SampleRng(std::uint64_t seed, std::uint64_t epoch, std::uint64_t sample)
      : state_(mix64(mix64(mix64(seed + kGoldenGamma) + epoch + kGoldenGamma) + sample + kGoldenGamma)) {}

  std::uint64_t next() { return mix64(state_ += kGoldenGamma); }
  /// Returns a value with low <= value < high.
  double uniform(double low, double high) { return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53); }
  /// Returns a value in [0, count), uniform to one part in 2^32. `count` must be 1 to 2^31.
  int uniform_int(int count) { return static_cast<int>((next() >> 32) * static_cast<std::uint64_t>(count) >> 32); }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep::data
