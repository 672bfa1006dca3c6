// How many of the batches of an epoch.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::train {

/// A count, which an integer becomes, or a share of all, which a floating-point number does: 10 are ten batches, 0.1 is
/// a tenth of them, 1.0 all.
class CountOrFraction {
 public:
  constexpr CountOrFraction(int count)
      : count_(count) {}  // NOLINT(google-explicit-constructor): .limit_train_batches = 10
  constexpr CountOrFraction(std::int64_t count) : count_(count) {}  // NOLINT(google-explicit-constructor)
  constexpr CountOrFraction(double fraction)
      : fraction_(fraction), is_fraction_(true) {}  // NOLINT(google-explicit-constructor)

  /// Of `num_batches`, rounded down, and not more than those. Throws UsageError, which begins with `option`, for a
  /// count below 0, a share that is not from 0 to 1, and a share above 0 of which no whole batch is left.
  std::int64_t resolve(std::int64_t num_batches, const std::string& option) const;

  /// "10", "0.1".
  std::string text() const;
  bool operator==(const CountOrFraction&) const = default;

 private:
  std::int64_t count_ = 0;
  double fraction_ = 0;
  bool is_fraction_ = false;
};

}  // namespace lockstep::train
