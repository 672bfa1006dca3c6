// Tests the operations of a store, on every kind of store that one process can have: a LocalStore, a PrefixStore of it,
// and a client of a StoreServer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_server.h"
#include "tests/unit/job/store_job.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

struct StoreFactory {
  const char* name;
  std::shared_ptr<Store> (*make)();
};

std::shared_ptr<Store> make_served_store() {
  struct Both {
    const Credentials credentials{"job", 0, JobKey::random()};
    StoreServer server{{"127.0.0.1", 0}, credentials};
    std::shared_ptr<Store> client = connect_store(server.address(), credentials, 0, within_10s());
  };
  auto both = std::make_shared<Both>();
  return {both, both->client.get()};
}

class AnyStore : public ::testing::TestWithParam<StoreFactory> {
 protected:
  std::shared_ptr<Store> store = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(
    Stores, AnyStore,
    ::testing::Values(StoreFactory{"Local", [] { return std::shared_ptr<Store>(std::make_shared<LocalStore>()); }},
                      StoreFactory{"Prefix",
                                   [] {
                                     return std::shared_ptr<Store>(
                                         std::make_shared<PrefixStore>("p", std::make_shared<LocalStore>()));
                                   }},
                      StoreFactory{"Served", make_served_store}),
    [](const auto& kind) { return std::string(kind.param.name); });

TEST_P(AnyStore, SetGetFind) {
  EXPECT_EQ(store->find("a", within_10s()), std::nullopt);
  EXPECT_EQ(store->get("a", Deadline::in(20ms)), std::nullopt);
  store->set("a", "1", within_10s());
  EXPECT_EQ(store->find("a", within_10s()), "1");
  EXPECT_EQ(store->get("a", within_10s()), "1");
  store->set("a", std::string("\0\n\xff", 3), within_10s());
  EXPECT_EQ(store->get("a", within_10s()), std::string("\0\n\xff", 3));
  store->set("empty", "", within_10s());
  EXPECT_EQ(store->find("empty", within_10s()), "");
}

TEST_P(AnyStore, AddReturnsTheSum) {
  EXPECT_EQ(store->add("n", 3, within_10s()), 3);
  EXPECT_EQ(store->add("n", -5, within_10s()), -2);
  EXPECT_EQ(store->find("n", within_10s()), "-2");
  store->set("text", "x", within_10s());
  EXPECT_THROW(store->add("text", 1, within_10s()), base::UsageError);
  store->set("large", std::to_string(INT64_MAX), within_10s());
  EXPECT_THROW(store->add("large", 1, within_10s()), base::UsageError);
  EXPECT_EQ(store->find("large", within_10s()), std::to_string(INT64_MAX));
}

TEST_P(AnyStore, CompareSetRequiresTheExpectedValue) {
  EXPECT_EQ(store->compare_set("k", "other", "new", within_10s()), "");
  EXPECT_EQ(store->find("k", within_10s()), std::nullopt);
  EXPECT_EQ(store->compare_set("k", "", "first", within_10s()), "first");
  EXPECT_EQ(store->compare_set("k", "", "second", within_10s()), "first");
  EXPECT_EQ(store->compare_set("k", "wrong", "second", within_10s()), "first");
  EXPECT_EQ(store->compare_set("k", "first", "second", within_10s()), "second");
  EXPECT_EQ(store->compare_set("k", "first", "", within_10s()), "second");
  EXPECT_EQ(store->compare_set("k", "second", "", within_10s()), "");
  EXPECT_EQ(store->find("k", within_10s()), std::nullopt) << "removed";
}

TEST_P(AnyStore, GetWaitsForSet) {
  std::thread late([&] {
    std::this_thread::sleep_for(50ms);
    store->set("late", "there", within_10s());
  });
  EXPECT_EQ(store->get("late", within_10s()), "there");
  late.join();
}

TEST_P(AnyStore, WaitingGetDoesNotBlockOthers) {
  std::vector<std::thread> waiters;
  std::atomic<int> got{0};
  for (int i = 0; i < 8; ++i)
    waiters.emplace_back([&, i] { got += store->get("key" + std::to_string(i % 4), within_10s()) == "v"; });
  EXPECT_EQ(store->add("n", 1, within_10s()), 1);
  for (int i = 0; i < 4; ++i) store->set("key" + std::to_string(i), "v", within_10s());
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(got, 8);
}

TEST_P(AnyStore, ConcurrentAddsAreAtomic) {
  std::vector<std::thread> threads;
  std::atomic<int> firsts{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        store->add("sum", 1, within_10s());
        const std::string mine = std::to_string(t);
        firsts += store->compare_set("first/" + std::to_string(i), "", mine, within_10s()) == mine;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->find("sum", within_10s()), "800");
  EXPECT_EQ(firsts, 200);
}

TEST_P(AnyStore, RejectsLongKeysAndValues) {
  const std::string key(GetParam().name == std::string("Prefix") ? 254 : 256, 'k');
  const std::string value(1 << 20, 'v');
  store->set(key, value, within_10s());
  EXPECT_EQ(store->find(key, within_10s()), value);
  EXPECT_EQ(store->compare_set(key, value, value, within_10s()), value);
  EXPECT_THROW(store->set(key + "k", "", within_10s()), base::UsageError);
  EXPECT_THROW(store->set("k", value + "v", within_10s()), base::UsageError);
  EXPECT_THROW(store->compare_set("k", "", value + "v", within_10s()), base::UsageError);
  EXPECT_THROW(store->add(key + "k", 1, within_10s()), base::UsageError);
  EXPECT_EQ(store->find("k", within_10s()), std::nullopt);
}

TEST(PrefixStore, SeparatesKeysByPrefix) {
  auto table = std::make_shared<LocalStore>();
  PrefixStore a("a", table);
  PrefixStore b("b", table);
  a.set("k", "in a", within_10s());
  b.set("k", "in b", within_10s());
  EXPECT_EQ(a.find("k", within_10s()), "in a");
  EXPECT_EQ(table->find("a/k", within_10s()), "in a");
  EXPECT_EQ(table->find("k", within_10s()), std::nullopt);
}

}  // namespace
}  // namespace lockstep::job
