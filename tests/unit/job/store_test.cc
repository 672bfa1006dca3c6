// The verbs of a store, on every kind that one process can hold: the table itself, a prefix of it, and a client of a
// server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/job/local_store.h"
#include "lockstep/job/store_client.h"
#include "lockstep/job/store_server.h"

namespace lockstep::job {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

Deadline soon() { return Deadline::in(10s); }

struct Kind {
  const char* name;
  std::shared_ptr<Store> (*make)();
};

std::shared_ptr<Store> served() {
  struct Both {
    const Credentials credentials{"job", 0, JobKey::random()};
    StoreServer server{{"127.0.0.1", 0}, credentials};
    std::shared_ptr<Store> client = connect_store(server.address(), credentials, 0, soon());
  };
  auto both = std::make_shared<Both>();
  return {both, both->client.get()};
}

class AnyStore : public ::testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<Store> store = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(Kinds, AnyStore,
                         ::testing::Values(Kind{"Local",
                                                [] { return std::shared_ptr<Store>(std::make_shared<LocalStore>()); }},
                                           Kind{"Prefix",
                                                [] {
                                                  return std::shared_ptr<Store>(std::make_shared<PrefixStore>(
                                                      "p", std::make_shared<LocalStore>()));
                                                }},
                                           Kind{"Served", served}),
                         [](const auto& kind) { return std::string(kind.param.name); });

TEST_P(AnyStore, SetGetFind) {
  EXPECT_EQ(store->find("a", soon()), std::nullopt);
  EXPECT_EQ(store->get("a", Deadline::in(20ms)), std::nullopt);
  store->set("a", "1", soon());
  EXPECT_EQ(store->find("a", soon()), "1");
  EXPECT_EQ(store->get("a", soon()), "1");
  store->set("a", std::string("\0\n\xff", 3), soon());
  EXPECT_EQ(store->get("a", soon()), std::string("\0\n\xff", 3));
  store->set("empty", "", soon());
  EXPECT_EQ(store->find("empty", soon()), "");
}

TEST_P(AnyStore, AddCounts) {
  EXPECT_EQ(store->add("n", 3, soon()), 3);
  EXPECT_EQ(store->add("n", -5, soon()), -2);
  EXPECT_EQ(store->find("n", soon()), "-2");
  store->set("text", "x", soon());
  EXPECT_THROW(store->add("text", 1, soon()), base::UsageError);
  store->set("large", std::to_string(INT64_MAX), soon());
  EXPECT_THROW(store->add("large", 1, soon()), base::UsageError);
  EXPECT_EQ(store->find("large", soon()), std::to_string(INT64_MAX));
}

TEST_P(AnyStore, CompareSetChangesOnlyWhatIsExpected) {
  EXPECT_EQ(store->compare_set("k", "other", "new", soon()), "");
  EXPECT_EQ(store->find("k", soon()), std::nullopt);
  EXPECT_EQ(store->compare_set("k", "", "first", soon()), "first");
  EXPECT_EQ(store->compare_set("k", "", "second", soon()), "first");
  EXPECT_EQ(store->compare_set("k", "wrong", "second", soon()), "first");
  EXPECT_EQ(store->compare_set("k", "first", "second", soon()), "second");
}

TEST_P(AnyStore, AGetWaitsForTheSet) {
  std::thread late([&] {
    std::this_thread::sleep_for(50ms);
    store->set("late", "there", soon());
  });
  EXPECT_EQ(store->get("late", soon()), "there");
  late.join();
}

TEST_P(AnyStore, WaitersDoNotHoldUpOthers) {
  std::vector<std::thread> waiters;
  std::atomic<int> got{0};
  for (int i = 0; i < 8; ++i)
    waiters.emplace_back([&, i] { got += store->get("key" + std::to_string(i % 4), soon()) == "v"; });
  EXPECT_EQ(store->add("n", 1, soon()), 1);
  for (int i = 0; i < 4; ++i) store->set("key" + std::to_string(i), "v", soon());
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(got, 8);
}

TEST_P(AnyStore, ManyThreadsLoseNothing) {
  std::vector<std::thread> threads;
  std::atomic<int> firsts{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        store->add("sum", 1, soon());
        const std::string mine = std::to_string(t);
        firsts += store->compare_set("first/" + std::to_string(i), "", mine, soon()) == mine;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->find("sum", soon()), "800");
  EXPECT_EQ(firsts, 200);
}

TEST_P(AnyStore, LongKeysAndValuesAreRefused) {
  const std::string key(GetParam().name == std::string("Prefix") ? 254 : 256, 'k');
  const std::string value(1 << 20, 'v');
  store->set(key, value, soon());
  EXPECT_EQ(store->find(key, soon()), value);
  EXPECT_EQ(store->compare_set(key, value, value, soon()), value);
  EXPECT_THROW(store->set(key + "k", "", soon()), base::UsageError);
  EXPECT_THROW(store->set("k", value + "v", soon()), base::UsageError);
  EXPECT_THROW(store->compare_set("k", "", value + "v", soon()), base::UsageError);
  EXPECT_THROW(store->add(key + "k", 1, soon()), base::UsageError);
  EXPECT_EQ(store->find("k", soon()), std::nullopt);
}

TEST(PrefixStore, KeepsItsKeysApart) {
  auto table = std::make_shared<LocalStore>();
  PrefixStore a("a", table);
  PrefixStore b("b", table);
  a.set("k", "in a", soon());
  b.set("k", "in b", soon());
  EXPECT_EQ(a.find("k", soon()), "in a");
  EXPECT_EQ(table->find("a/k", soon()), "in a");
  EXPECT_EQ(table->find("k", soon()), std::nullopt);
}

}  // namespace
}  // namespace lockstep::job
