#include "lockstep/data/permutation.h"

#include <algorithm>
#include <bit>

#include "lockstep/base/check.h"
#include "lockstep/data/splitmix64.h"

namespace lockstep::data {
namespace {

// With fewer bits per half, a round function has too few outputs to mix well. Smaller ranges therefore apply the
// network more often, which is cheap because the network then permutes only 256 values.
constexpr int kMinHalfBits = 4;

}  // namespace

Permutation::Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch) : n_(n) {
  LOCKSTEP_CHECK(n >= 1 && n <= std::uint64_t{1} << 62);
  half_bits_ = std::max(kMinHalfBits, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
  half_mask_ = (std::uint64_t{1} << half_bits_) - 1;
  // The epoch is mixed separately, so that (seed 1, epoch 2) and (seed 2, epoch 1) differ.
  std::uint64_t state = mix64(mix64(seed + kGoldenGamma) + epoch * kGoldenGamma + 1);
  for (auto& key : keys_) key = mix64(state += kGoldenGamma);
}

std::uint64_t Permutation::encrypt(std::uint64_t value) const {
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & half_mask_;
  for (const auto key : keys_) {
    const std::uint64_t next = left ^ (mix64(right + key) & half_mask_);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

std::uint64_t Permutation::operator[](std::uint64_t i) const {
  LOCKSTEP_CHECK(i < n_);
  do i = encrypt(i);
  while (i >= n_);
  return i;
}

}  // namespace lockstep::data
