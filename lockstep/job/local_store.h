// A store in the memory of one process, for a world of size one and for a StoreServer, which serves it to other
// processes.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>

#include "lockstep/job/store.h"

namespace lockstep::job {

/// Throws UsageError if `key` or `value` exceeds the limits of a store.
void check_limits(std::string_view key, std::string_view value);

/// A Store in this process's memory. Thread-safe; only get() blocks.
class LocalStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value, base::Deadline deadline) override;
  std::optional<std::string> get(std::string_view key, base::Deadline deadline) override;
  std::optional<std::string> find(std::string_view key, base::Deadline deadline) override;
  std::int64_t add(std::string_view key, std::int64_t amount, base::Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          base::Deadline deadline) override;

  /// Sets a function that is called with the key after every change, on the thread that made it, without the lock held.
  /// Must be called before other threads use the store.
  void on_change(std::function<void(std::string_view key)> listener) { listener_ = std::move(listener); }

 private:
  void notify_changed(std::string_view key) {
    changed_.notify_all();
    if (listener_) listener_(key);
  }

  std::mutex mutex_;  // guards values_
  std::condition_variable changed_;
  std::map<std::string, std::string, std::less<>> values_;
  std::function<void(std::string_view)> listener_;
};

}  // namespace lockstep::job
