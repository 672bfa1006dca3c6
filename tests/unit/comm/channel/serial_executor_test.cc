#include "lockstep/comm/channel/serial_executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "lockstep/comm/interface/pending.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::channel {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

std::string error_text(const std::exception_ptr& error) {
  return tests::message_of<std::exception>([&] {
    if (error) std::rethrow_exception(error);
  });
}

std::exception_ptr failure(const char* text) { return std::make_exception_ptr(std::runtime_error(text)); }

TEST(Pending, FirstFinishWins) {
  Pending pending;
  EXPECT_FALSE(pending.done());
  EXPECT_FALSE(pending.wait_until(Deadline::in(5ms)));
  pending.finish(failure("first"));
  pending.finish();
  pending.finish(failure("third"));
  EXPECT_TRUE(pending.done());
  EXPECT_TRUE(pending.wait_until(Deadline::in(0ms)));
  EXPECT_EQ(error_text(pending.error()), "first");
  EXPECT_TRUE(make_finished_pending()->done());
  EXPECT_EQ(make_finished_pending()->error(), nullptr);
}

TEST(Pending, WakesAllWaiters) {
  Pending pending;
  std::vector<std::thread> threads;
  std::atomic<int> woken{0};
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] { woken += pending.wait_until(i ? Deadline::in(20s) : Deadline::never()); });
  pending.finish();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(woken, 3);
}

TEST(SerialExecutor, RunsTasksInOrder) {
  SerialExecutor executor;
  std::vector<int> order;
  std::vector<PendingPtr> ends;
  for (int i = 0; i < 100; ++i) ends.push_back(executor.post([&, i] { order.push_back(i); }));
  EXPECT_TRUE(ends.back()->wait_until(Deadline::in(20s)));
  std::vector<int> wanted(100);
  std::iota(wanted.begin(), wanted.end(), 0);
  EXPECT_EQ(order, wanted);
  EXPECT_TRUE(executor.is_idle());
}

TEST(SerialExecutor, ErrorIsReportedByItsTask) {
  SerialExecutor executor;
  const PendingPtr bad = executor.post([] { throw std::runtime_error("bad"); });
  const PendingPtr good = executor.post([] {});
  EXPECT_TRUE(good->wait_until(Deadline::in(20s)));
  EXPECT_EQ(error_text(bad->error()), "bad");
  EXPECT_EQ(good->error(), nullptr);
}

TEST(SerialExecutor, IsNotIdleWhileTasksAreQueuedOrRunning) {
  SerialExecutor executor;
  EXPECT_TRUE(executor.is_idle());
  Pending gate;
  const PendingPtr first = executor.post([&] { gate.wait_until(Deadline::in(20s)); });
  EXPECT_FALSE(executor.is_idle());
  gate.finish();
  EXPECT_TRUE(first->wait_until(Deadline::in(20s)));
  EXPECT_TRUE(executor.is_idle()) << "a task that is done is no longer in the queue";
}

TEST(SerialExecutor, TaskIsDestroyedBeforeItsPendingIsDone) {
  SerialExecutor executor;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = held;
  const PendingPtr end = executor.post([held = std::move(held)] {});
  EXPECT_TRUE(end->wait_until(Deadline::in(20s)));
  EXPECT_TRUE(seen.expired());
}

TEST(SerialExecutor, CurrentIsSetOnItsThread) {
  EXPECT_EQ(SerialExecutor::current(), nullptr);
  SerialExecutor executor;
  const SerialExecutor* inside = nullptr;
  executor.post([&] { inside = SerialExecutor::current(); })->wait_until(Deadline::in(20s));
  EXPECT_EQ(inside, &executor);
  EXPECT_EQ(SerialExecutor::current(), nullptr);
}

TEST(SerialExecutor, DestructorRunsQueuedTasks) {
  int ran = 0;
  {
    SerialExecutor executor;
    for (int i = 0; i < 5; ++i) executor.post([&] { ++ran; });
  }
  EXPECT_EQ(ran, 5);
}

}  // namespace
}  // namespace lockstep::comm::channel
