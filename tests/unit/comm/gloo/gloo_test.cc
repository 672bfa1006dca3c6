#include "lockstep/comm/gloo/gloo.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/job/local_store.h"

namespace lockstep::comm::gloo {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

/// A store that delays the address of one rank until another rank has closed its transport, or for 100 ms.
class DelayedStore final : public job::Store {
 public:
  DelayedStore(std::shared_ptr<job::Store> store, std::string delayed_suffix, const std::atomic<int>& num_closed)
      : store_(std::move(store)), delayed_suffix_(std::move(delayed_suffix)), num_closed_(num_closed) {}

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    store_->set(key, value, deadline);
  }
  std::optional<std::string> get(std::string_view key, Deadline deadline) override {
    if (key.ends_with(delayed_suffix_))
      for (const Deadline delay_end = Deadline::in(100ms); num_closed_ < 1 && !delay_end.expired();)
        std::this_thread::sleep_for(1ms);
    return store_->get(key, deadline);
  }
  std::optional<std::string> find(std::string_view key, Deadline deadline) override {
    return store_->find(key, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount, Deadline deadline) override {
    return store_->add(key, amount, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return store_->compare_set(key, expected, desired, deadline);
  }

 private:
  std::shared_ptr<job::Store> store_;
  const std::string delayed_suffix_;
  const std::atomic<int>& num_closed_;
};

/// Connects three ranks, each of which closes its transport at once. The store delays the address of rank 1 for rank 2.
void connect_and_close() {
  const auto store = std::make_shared<job::LocalStore>();
  std::atomic<int> num_closed = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        const std::shared_ptr<job::Store> own =
            rank == 2 ? std::make_shared<DelayedStore>(store, "/1", num_closed) : std::shared_ptr<job::Store>(store);
        make_gloo_transport({.store = own, .rank = rank, .size = 3, .address = "127.0.0.1", .timeout = 10s}).reset();
        ++num_closed;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(num_closed, 3);
}

TEST(Gloo, RankThatClosesImmediatelyDoesNotBreakOthersConnecting) {
  if (!gloo_unavailable_reason().empty()) GTEST_SKIP() << gloo_unavailable_reason();
  for (int i = 0; i < 5 && !HasFailure(); ++i) connect_and_close();
}

}  // namespace
}  // namespace lockstep::comm::gloo
