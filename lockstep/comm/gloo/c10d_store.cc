#include "lockstep/comm/gloo/c10d_store.h"

#include <c10/util/Exception.h>

namespace lockstep::comm::gloo {
namespace {

using base::Deadline;
using Bytes = std::vector<std::uint8_t>;

std::string text(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes bytes(const std::string& value) { return {value.begin(), value.end()}; }

class C10dStore final : public c10d::Store {
 public:
  C10dStore(std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), store_(std::move(store)) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<C10dStore>(store_, timeout_); }

  void set(const std::string& key, const Bytes& value) override { store_->set(key, text(value), default_deadline()); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return bytes(store_->compare_set(key, text(expected), text(desired), default_deadline()));
  }
  Bytes get(const std::string& key) override { return bytes(wait_for(key, default_deadline())); }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_->add(key, amount, default_deadline());
  }
  bool check(const std::vector<std::string>& keys) override {
    for (const auto& key : keys)
      if (!store_->find(key, default_deadline())) return false;
    return true;
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const Deadline deadline = Deadline::in(timeout);
    for (const auto& key : keys) wait_for(key, deadline);
  }

  // ProcessGroupGloo does not call these.
  bool deleteKey(const std::string&) override {
    C10_THROW_ERROR(NotImplementedError, "Lockstep's store cannot delete keys");
  }
  std::int64_t getNumKeys() override { C10_THROW_ERROR(NotImplementedError, "Lockstep's store cannot count keys"); }

 private:
  Deadline default_deadline() const { return Deadline::in(timeout_); }
  std::string wait_for(const std::string& key, Deadline deadline) {
    auto value = store_->get(key, deadline);
    if (!value) C10_THROW_ERROR(DistStoreError, "no rank set the key " + key + " in time");
    return *std::move(value);
  }

  std::shared_ptr<job::Store> store_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<C10dStore>(std::move(store), timeout);
}

}  // namespace lockstep::comm::gloo
