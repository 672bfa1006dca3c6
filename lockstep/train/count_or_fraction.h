// A number of batches, given as a count or as a fraction of an epoch.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::training {

/// An integer is a count of batches, a floating-point number is a fraction of them: 10 means ten batches, 0.1 a tenth
/// of the batches, 1.0 all of them.
class CountOrFraction {
 public:
  constexpr CountOrFraction(int count)
      : count_(count) {}  // NOLINT(google-explicit-constructor): .limit_train_batches = 10
  constexpr CountOrFraction(std::int64_t count) : count_(count) {}  // NOLINT(google-explicit-constructor)
  constexpr CountOrFraction(double fraction)
      : fraction_(fraction), is_fraction_(true) {}  // NOLINT(google-explicit-constructor)

  /// Returns the number of batches out of `num_batches`, rounded down. A count is capped at `num_batches`. Throws a
  /// UsageError that begins with `option` for a negative count, a fraction outside 0 to 1, and a fraction above 0 that
  /// is less than one batch.
  std::int64_t resolve(std::int64_t num_batches, const std::string& option) const;

  /// "10", "0.1".
  std::string to_string() const;
  bool operator==(const CountOrFraction&) const = default;

 private:
  std::int64_t count_ = 0;
  double fraction_ = 0;
  bool is_fraction_ = false;
};

}  // namespace lockstep::training
