// A pseudo-random order of 0 .. n-1 that is computed one element at a time: no memory, whatever n is.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep::data {

/// A bijection of [0, n) chosen by `seed` and `epoch`: the same on every machine, in every version. A balanced Feistel
/// network over the smallest even number of bits that holds n - 1 (Luby and Rackoff, "How to Construct Pseudorandom
/// Permutations from Pseudorandom Functions", SIAM J. Comput. 1988), walked until it falls inside the range (Black and
/// Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Not for secrets: its mixing is fast, not strong.
class Permutation {
 public:
  /// n >= 1, at most 2^62; a check fails otherwise.
  Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch);

  /// The element at `i`, which must be less than n. On average at most 4 walks of the network when n >= 64.
  std::uint64_t operator[](std::uint64_t i) const;
  std::uint64_t size() const { return n_; }

 private:
  static constexpr int kRounds = 6;

  std::uint64_t encrypt(std::uint64_t value) const;

  std::uint64_t n_;
  int half_bits_;
  std::uint64_t half_mask_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace lockstep::data
