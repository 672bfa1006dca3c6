// How many of the batches of an epoch.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::train {

/// A count, which an integer becomes, or a share of all, which a floating-point number does: 10 are ten batches, 0.1 is
/// a tenth of them, 1.0 all.
class Amount {
 public:
  constexpr Amount(int count) : count_(count) {}  // NOLINT(google-explicit-constructor): .limit_train_batches = 10
  constexpr Amount(std::int64_t count) : count_(count) {}             // NOLINT(google-explicit-constructor)
  constexpr Amount(double share) : share_(share), is_share_(true) {}  // NOLINT(google-explicit-constructor)

  /// Of `num_batches`, rounded down, and not more than those. Throws UsageError, which begins with `option`, for a
  /// count below 0, a share that is not from 0 to 1, and a share above 0 of which no whole batch is left.
  std::int64_t of(std::int64_t num_batches, const std::string& option) const;

  /// "10", "0.1".
  std::string text() const;
  bool operator==(const Amount&) const = default;

 private:
  std::int64_t count_ = 0;
  double share_ = 0;
  bool is_share_ = false;
};

}  // namespace lockstep::train
