#include "lockstep/job/store.h"

namespace lockstep::job {

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix)), store_(std::move(store)) {}

std::string PrefixStore::prefixed(std::string_view key) const { return prefix_ + "/" + std::string(key); }

void PrefixStore::set(std::string_view key, std::string_view value, base::Deadline deadline) {
  store_->set(prefixed(key), value, deadline);
}

std::optional<std::string> PrefixStore::get(std::string_view key, base::Deadline deadline) {
  return store_->get(prefixed(key), deadline);
}

std::optional<std::string> PrefixStore::find(std::string_view key, base::Deadline deadline) {
  return store_->find(prefixed(key), deadline);
}

std::int64_t PrefixStore::add(std::string_view key, std::int64_t amount, base::Deadline deadline) {
  return store_->add(prefixed(key), amount, deadline);
}

std::string PrefixStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                     base::Deadline deadline) {
  return store_->compare_set(prefixed(key), expected, desired, deadline);
}

}  // namespace lockstep::job
