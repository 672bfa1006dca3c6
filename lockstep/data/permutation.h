// A pseudo-random order of 0 .. n-1 that is computed one element at a time, in constant memory.
#pragma once

#include <array>
#include <cstdint>

namespace lockstep::data {

/// A bijection of [0, n) that depends on `seed` and `epoch` only: it is the same on every machine and in every version.
/// Implemented as a balanced Feistel network over the smallest even number of bits that holds n - 1 (Luby and Rackoff,
/// "How to Construct Pseudorandom Permutations from Pseudorandom Functions", SIAM J. Comput. 1988), applied repeatedly
/// until the value falls inside the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
/// Not for cryptography: its round function is fast, not secure.
class Permutation {
 public:
  /// Requires 1 <= n <= 2^62, which is checked.
  Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t epoch);

  /// Returns the element at `i`, which must be less than n. Applies the network at most 4 times on average if n >= 64.
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
