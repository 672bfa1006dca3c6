// What the ranks of a job know in common: small values under names. Rendezvous, agreement and post-mortem use it; the
// data of a step never does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::job {

inline constexpr std::size_t kMaxKeyBytes = 256;
inline constexpr std::size_t kMaxValueBytes = 1 << 20;

/// A few verbs. Any thread may call any of them. Keys are at most 256 bytes, values at most 1 MiB (UsageError). When
/// the store itself is gone every verb throws CommError with cause kCoordinatorLost.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value, base::Deadline deadline) = 0;

  /// The value of `key`, waiting until there is one. Nothing at the deadline.
  virtual std::optional<std::string> get(std::string_view key, base::Deadline deadline) = 0;

  /// The value of `key` if there is one now.
  virtual std::optional<std::string> find(std::string_view key, base::Deadline deadline) = 0;

  /// Adds to the decimal number under `key` (0 when there is none) and returns the sum.
  virtual std::int64_t add(std::string_view key, std::int64_t amount, base::Deadline deadline) = 0;

  /// Sets `key` to `desired` if its value is `expected` (an empty `expected` also fits a key that does not exist), and
  /// returns the value that `key` has afterwards.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  base::Deadline deadline) = 0;
};

/// The same store, every key with `prefix` and '/' in front.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);
  void set(std::string_view key, std::string_view value, base::Deadline deadline) override;
  std::optional<std::string> get(std::string_view key, base::Deadline deadline) override;
  std::optional<std::string> find(std::string_view key, base::Deadline deadline) override;
  std::int64_t add(std::string_view key, std::int64_t amount, base::Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          base::Deadline deadline) override;

 private:
  std::string prefixed(std::string_view key) const;
  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace lockstep::job
