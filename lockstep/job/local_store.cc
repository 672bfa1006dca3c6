#include "lockstep/job/local_store.h"

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {

void check_limits(std::string_view key, std::string_view value) {
  if (key.size() > kMaxKeyBytes || value.size() > kMaxValueBytes)
    throw base::UsageError("store: key " + base::quoted(key, 80) + " has " + std::to_string(key.size()) +
                           " bytes and its value " + std::to_string(value.size()) +
                           " bytes; expected at most 256 and 1048576");
}

void LocalStore::set(std::string_view key, std::string_view value, base::Deadline) {
  check_limits(key, value);
  {
    const std::lock_guard lock(mutex_);
    values_.insert_or_assign(std::string(key), std::string(value));
  }
  notify_changed(key);
}

std::optional<std::string> LocalStore::get(std::string_view key, base::Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!base::wait_until(changed_, lock, deadline, [&] { return values_.contains(key); })) return std::nullopt;
  return values_.find(key)->second;
}

std::optional<std::string> LocalStore::find(std::string_view key, base::Deadline) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  return found == values_.end() ? std::nullopt : std::optional(found->second);
}

std::int64_t LocalStore::add(std::string_view key, std::int64_t amount, base::Deadline) {
  check_limits(key, {});
  std::int64_t sum = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    const std::string value = found == values_.end() ? std::string() : found->second;
    const auto number = value.empty() ? 0 : base::parse_int(value);
    if (!number || __builtin_add_overflow(*number, amount, &sum))
      throw base::UsageError("store: cannot add " + std::to_string(amount) + " to key " + base::quoted(key, 80) +
                             ", which holds " + base::quoted(value, 80));
    values_.insert_or_assign(std::string(key), std::to_string(sum));
  }
  notify_changed(key);
  return sum;
}

std::string LocalStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                    base::Deadline) {
  check_limits(key, desired);
  {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    const std::string_view now = found == values_.end() ? std::string_view() : found->second;
    if (now != expected) return std::string(now);
    if (!desired.empty())
      values_.insert_or_assign(std::string(key), std::string(desired));
    else if (found != values_.end())
      values_.erase(found);
  }
  notify_changed(key);
  return std::string(desired);
}

}  // namespace lockstep::job
