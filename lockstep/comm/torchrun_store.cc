#include "lockstep/comm/torchrun_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kStep = std::chrono::milliseconds(20);

class TorchrunStore final : public job::Store {
 public:
  TorchrunStore(const base::Address& address, Deadline deadline) {
    c10d::TCPStoreOptions options;
    options.port = address.port;
    options.isServer = false;
    options.waitWorkers = false;
    options.timeout = deadline.left();
    store_ = c10::make_intrusive<c10d::TCPStore>(address.host, options);
  }

  void set(std::string_view key, std::string_view value, Deadline) override {
    guarded([&] { base_store().set(std::string(key), std::string(value)); });
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    // c10d's own wait prints stack traces when its time is over: ask instead.
    for (;;) {
      if (auto value = find(key, deadline)) return value;
      if (deadline.expired()) return std::nullopt;
      std::this_thread::sleep_for(std::min(kStep, deadline.left()));
    }
  }
  std::optional<std::string> find(std::string_view key, Deadline) override {
    std::optional<std::string> value;
    guarded([&] {
      if (base_store().check({std::string(key)})) value = base_store().get_to_str(std::string(key));
    });
    return value;
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline) override {
    std::int64_t sum = 0;
    guarded([&] { sum = base_store().add(std::string(key), amount); });
    return sum;
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired, Deadline) override {
    std::string now;
    guarded([&] { now = base_store().compareSet(std::string(key), std::string(expected), std::string(desired)); });
    return now;
  }

 private:
  // TCPStore hides the overloads for strings.
  c10d::Store& base_store() { return *store_; }

  template <typename F>
  void guarded(F&& call) {
    try {
      call();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      throw base::CommError(base::Cause::kCoordinatorLost, "store", -1, -1,
                            "torchrun's store failed: " + text.substr(0, text.find('\n')));
    }
  }

  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace

std::shared_ptr<job::Store> connect_torchrun_store(const base::Address& address, Deadline deadline) {
  try {
    return std::make_shared<TorchrunStore>(address, deadline);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw base::CommError(base::Cause::kCoordinatorLost, "init", -1, -1,
                          "torchrun's store at " + to_string(address) + " does not answer: " + text.substr(0, text.find('\n')));
  }
}

}  // namespace lockstep::comm
