// The key-value store that the ranks of a job share. It holds small values for rendezvous, agreement and post-mortem
// reports; tensor data never passes through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::job {

inline constexpr std::size_t kMaxKeyBytes = 256;
inline constexpr std::size_t kMaxValueBytes = 1 << 20;

/// The interface of a store. All methods are thread-safe. Keys have at most 256 bytes and values at most 1 MiB; longer
/// ones throw UsageError. Every method throws CommError if the store is lost: kPeerUnreachable if its host is
/// unreachable, else kCoordinatorLost. Except for get(), no method waits for another rank, but it may block on the
/// network: until its deadline, or for 10 s if that is longer.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value, base::Deadline deadline) = 0;

  /// Blocks until `key` has a value and returns it. Returns nullopt at the deadline.
  virtual std::optional<std::string> get(std::string_view key, base::Deadline deadline) = 0;

  /// Returns the value of `key`, or nullopt if it has none, without waiting for one.
  virtual std::optional<std::string> find(std::string_view key, base::Deadline deadline) = 0;

  /// Atomically adds `amount` to the decimal number under `key`, or to 0 if it has no value, and returns the sum.
  /// Throws UsageError if the value is not a number or the sum overflows.
  virtual std::int64_t add(std::string_view key, std::int64_t amount, base::Deadline deadline) = 0;

  /// Atomically sets `key` to `desired` if its value is `expected` (an empty `expected` also matches a key without a
  /// value), and returns the value that `key` has afterwards. With an empty `desired` it then has none.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  base::Deadline deadline) = 0;
};

/// A view of another store that prepends `prefix` and '/' to every key.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix)), store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value, base::Deadline deadline) override {
    store_->set(prefixed(key), value, deadline);
  }
  std::optional<std::string> get(std::string_view key, base::Deadline deadline) override {
    return store_->get(prefixed(key), deadline);
  }
  std::optional<std::string> find(std::string_view key, base::Deadline deadline) override {
    return store_->find(prefixed(key), deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, base::Deadline deadline) override {
    return store_->add(prefixed(key), amount, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          base::Deadline deadline) override {
    return store_->compare_set(prefixed(key), expected, desired, deadline);
  }

 private:
  std::string prefixed(std::string_view key) const { return prefix_ + "/" + std::string(key); }

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace lockstep::job
