#include "lockstep/comm/shm/progress_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena.h"
#include "tests/support/temp_dir.h"

namespace lockstep::comm::shm {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

/// Something that happens once, and for which other threads wait.
class Event {
 public:
  void set() { pending_.finish(); }
  bool is_set() { return pending_.done(); }
  bool wait(std::chrono::milliseconds limit = 20s) { return pending_.wait_until(Deadline::in(limit)); }

 private:
  Pending pending_;
};

/// Includes threads of earlier tests that are just ending.
std::ptrdiff_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

std::chrono::milliseconds cpu_time_of_this_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::milliseconds(time.tv_nsec / 1'000'000);
}

std::exception_ptr abort_cause() { return std::make_exception_ptr(std::runtime_error("aborted")); }

std::string what_of(const std::exception_ptr& error) {
  return tests::message_of<std::exception>([&] {
    if (error) std::rethrow_exception(error);
  });
}

/// An engine that is aborted before it is destroyed, as its owners do.
class ProgressEngineTest : public testing::Test {
 protected:
  ~ProgressEngineTest() override { destroy(); }
  void destroy() {
    if (engine_) engine_->abort(abort_cause());
    engine_.reset();
  }

  /// Returns an operation that appends `number` to order_ and ends, once `number` is at most limit_.
  ProgressEngine::AdvanceFn numbered(int number) {
    return [this, number](Deadline) {
      if (number > limit_) return false;
      order_.push_back(number);
      return true;
    };
  }

  std::optional<ProgressEngine> engine_{std::in_place, "shm"};
  std::atomic<int> limit_{0};
  std::vector<int> order_;
};

TEST_F(ProgressEngineTest, OperationsRunInOrder) {
  const PendingPtr second = engine_->add(numbered(2));
  const PendingPtr first = engine_->add(numbered(1));
  const PendingPtr third = engine_->add(numbered(3));
  limit_ = 1;
  EXPECT_FALSE(first->wait_until(Deadline::in(5ms))) << "an operation overtook an earlier one";
  limit_ = 2;
  EXPECT_TRUE(first->wait_until(Deadline::in(20s))) << "a wait runs the operations that are queued before";
  EXPECT_TRUE(second->done());
  EXPECT_FALSE(third->done());
  const PendingPtr fourth = engine_->add(numbered(4));
  limit_ = 4;
  EXPECT_TRUE(fourth->done()) << "done() does what is possible without blocking";
  EXPECT_TRUE(third->done());
  EXPECT_EQ(order_, (std::vector<int>{2, 1, 3, 4}));
}

TEST_F(ProgressEngineTest, AddAdvancesOnceWithoutBlocking) {
  std::vector<bool> expired;
  const PendingPtr op = engine_->add([&](Deadline deadline) {
    expired.push_back(deadline.expired());
    return false;
  });
  EXPECT_EQ(expired, std::vector<bool>{true});
  EXPECT_FALSE(op->wait_until(Deadline::in(0ms)));
  EXPECT_FALSE(op->wait_until(Deadline::in(5ms)));
  EXPECT_GT(expired.size(), 1u);
}

TEST_F(ProgressEngineTest, FastPathRunsOnlyIfNothingIsQueued) {
  int calls = 0;
  EXPECT_TRUE(engine_->try_now([&] { return ++calls > 0; }));
  EXPECT_FALSE(engine_->try_now([&] { return ++calls < 0; })) << "not finished";
  EXPECT_EQ(calls, 2);
  const PendingPtr queued = engine_->add(numbered(1));
  EXPECT_FALSE(engine_->try_now([&] { return ++calls > 0; }));
  EXPECT_EQ(calls, 2) << "an operation overtook a queued one";
  limit_ = 1;
  EXPECT_TRUE(queued->wait_until(Deadline::in(20s)));
  EXPECT_THROW(engine_->try_now([]() -> bool { throw arena::ArenaFull("full"); }), arena::ArenaFull);
  EXPECT_TRUE(engine_->try_now([&] { return ++calls > 0; }));
  engine_->abort(abort_cause());
  EXPECT_FALSE(engine_->try_now([&] { return ++calls > 0; }));
  EXPECT_EQ(calls, 3) << "an operation ran after the abort";
}

TEST_F(ProgressEngineTest, OnlyBackgroundOperationsNeedAThread) {
  const std::ptrdiff_t before = num_threads();
  const std::thread::id caller = std::this_thread::get_id();
  std::thread::id foreground;
  engine_->try_now([] { return true; });
  EXPECT_TRUE(engine_
                  ->add([&, calls = 0](Deadline) mutable {
                    foreground = std::this_thread::get_id();
                    return ++calls > 1;
                  })
                  ->wait_until(Deadline::in(20s)));
  EXPECT_EQ(foreground, caller);
  EXPECT_LE(num_threads(), before);

  std::vector<std::thread::id> background;
  Event ran;
  const auto record_thread = [&](Deadline) {
    background.push_back(std::this_thread::get_id());
    ran.set();
    return true;
  };
  engine_->add_background(record_thread);
  EXPECT_TRUE(ran.wait()) << "it makes progress although no thread waits for it";
  EXPECT_TRUE(engine_->add_background(record_thread)->wait_until(Deadline::in(20s)));
  EXPECT_NE(background.front(), caller);
  EXPECT_EQ(background.front(), background.back()) << "an engine has one thread";
}

TEST_F(ProgressEngineTest, BackgroundOperationRunsThoseBeforeIt) {
  Event entered, gate;
  engine_->add(numbered(1));
  EXPECT_EQ(order_, std::vector<int>());
  limit_ = 4;
  engine_->add_background([&](Deadline) {
    entered.set();
    EXPECT_TRUE(gate.wait());
    order_.push_back(2);
    return true;
  });
  EXPECT_TRUE(entered.wait());
  EXPECT_EQ(order_, std::vector<int>{1});
  // While it runs, no other thread runs an operation or waits for the mutex.
  const PendingPtr third = engine_->add(numbered(3));
  const PendingPtr fourth = engine_->add_background(numbered(4));
  EXPECT_FALSE(third->done());
  EXPECT_FALSE(third->wait_until(Deadline::in(5ms)));
  EXPECT_FALSE(engine_->try_now([] { return true; }));
  EXPECT_EQ(order_, std::vector<int>{1});
  gate.set();
  EXPECT_TRUE(fourth->wait_until(Deadline::in(20s)));
  EXPECT_EQ(order_, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_TRUE(third->done());
  EXPECT_TRUE(engine_->try_now([] { return true; }));
}

TEST_F(ProgressEngineTest, ExceptionFailsItsOperationAlone) {
  limit_ = 2;
  const PendingPtr failed = engine_->add([](Deadline) -> bool { throw std::runtime_error("bad"); });
  const PendingPtr next = engine_->add(numbered(1));
  EXPECT_TRUE(failed->done());
  EXPECT_EQ(what_of(failed->error()), "bad");
  EXPECT_TRUE(next->done());
  EXPECT_EQ(next->error(), nullptr);
  const PendingPtr background = engine_->add_background([](Deadline) -> bool { throw std::runtime_error("worse"); });
  EXPECT_TRUE(background->wait_until(Deadline::in(20s)));
  EXPECT_EQ(what_of(background->error()), "worse");
  EXPECT_TRUE(engine_->add(numbered(2))->done());
  EXPECT_EQ(order_, (std::vector<int>{1, 2}));
}

TEST_F(ProgressEngineTest, FullArenaIsAnErrorOfTheTransport) {
  const PendingPtr failed = engine_->add([](Deadline) -> bool { throw arena::ArenaFull("the arena is full"); });
  ASSERT_TRUE(failed->done() && failed->error());
  try {
    std::rethrow_exception(failed->error());
  } catch (const base::CommError& error) {
    EXPECT_EQ(error.op(), "shm");
    EXPECT_EQ(error.cause(), base::Cause::kResource);
    EXPECT_STREQ(error.what(), "the arena is full");
  }
}

TEST_F(ProgressEngineTest, ResourcesAreReleasedBeforeTheOperationIsDone) {
  for (const bool background : {false, true}) {
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = held;
    ProgressEngine::AdvanceFn advance_fn = [held = std::move(held)](Deadline) { return true; };
    const PendingPtr op =
        background ? engine_->add_background(std::move(advance_fn)) : engine_->add(std::move(advance_fn));
    EXPECT_TRUE(op->wait_until(Deadline::in(20s)));
    EXPECT_TRUE(seen.expired()) << background;
  }
}

TEST_F(ProgressEngineTest, AbortFinishesQueuedAndLaterOperations) {
  const PendingPtr first = engine_->add(numbered(1));
  const PendingPtr second = engine_->add(numbered(2));
  limit_ = 4;
  engine_->abort(abort_cause());
  engine_->abort(std::make_exception_ptr(std::runtime_error("second cause")));
  const PendingPtr third = engine_->add(numbered(3));
  const std::ptrdiff_t before = num_threads();
  const PendingPtr fourth = engine_->add_background(numbered(4));
  EXPECT_LE(num_threads(), before);
  for (const PendingPtr& op : {first, second, third, fourth}) {
    EXPECT_TRUE(op->done());
    EXPECT_EQ(what_of(op->error()), "aborted");
  }
  EXPECT_EQ(order_, std::vector<int>());
}

/// `running_` is in a step when start() returns: on a thread that waits for it, or on the engine's thread. `next_` is
/// queued behind it.
class BusyProgressEngine : public ProgressEngineTest, public testing::WithParamInterface<bool> {
 protected:
  bool in_background() const { return GetParam(); }
  /// Each step of the operation calls `step`. The operation does not end.
  void start(const std::function<void()>& step) {
    const auto advance_fn = [this, step](Deadline deadline) {
      ++num_steps_;
      if (deadline.expired()) return false;  // called by add()
      entered_.set();
      step();
      return false;
    };
    running_ = in_background() ? engine_->add_background(advance_fn) : engine_->add(advance_fn);
    next_ = engine_->add(numbered(1));
    waiter_ = std::thread([this] { has_ended_ = running_->wait_until(Deadline::in(20s)); });
    EXPECT_TRUE(entered_.wait());
  }
  void expect_both_aborted() {
    waiter_.join();
    EXPECT_TRUE(has_ended_);
    EXPECT_EQ(what_of(running_->error()), "aborted");
    EXPECT_TRUE(next_->wait_until(Deadline::in(20s)));
    EXPECT_EQ(what_of(next_->error()), "aborted");
    EXPECT_EQ(order_, std::vector<int>());
  }

  Event entered_;
  std::atomic<int> num_steps_{0};
  bool has_ended_ = false;
  PendingPtr running_, next_;
  std::thread waiter_;
};

TEST_P(BusyProgressEngine, DoneAndAbortDoNotBlock) {
  limit_ = 1;
  Event aborted;
  start([&] { EXPECT_TRUE(aborted.wait()) << "done() or abort() waited for this step"; });
  EXPECT_FALSE(running_->done());
  EXPECT_FALSE(next_->done());
  engine_->abort(abort_cause());
  const int steps = num_steps_;
  aborted.set();
  expect_both_aborted();
  destroy();
  EXPECT_EQ(num_steps_, steps) << "a step began after abort()";
}

TEST_P(BusyProgressEngine, DestructorWaitsForTheStep) {
  limit_ = 1;
  Event destroyed;
  start([&] { EXPECT_FALSE(destroyed.wait(100ms)) << "the destructor returned during this step"; });
  destroy();
  destroyed.set();
  expect_both_aborted();
}

INSTANTIATE_TEST_SUITE_P(, BusyProgressEngine, testing::Bool(),
                         [](const auto& mode) { return mode.param ? "Background" : "Foreground"; });

TEST_F(ProgressEngineTest, BackgroundOperationMayEndAfterAbort) {
  Event entered, gate;
  const PendingPtr running = engine_->add_background([&](Deadline) {
    entered.set();
    EXPECT_TRUE(gate.wait());
    return true;
  });
  const PendingPtr next = engine_->add_background(numbered(1));
  limit_ = 1;
  EXPECT_TRUE(entered.wait());
  engine_->abort(abort_cause());
  EXPECT_TRUE(running->done() && next->done()) << "abort() finishes them while the step is running";
  gate.set();
  destroy();
  EXPECT_EQ(what_of(running->error()), "aborted");
  EXPECT_EQ(order_, std::vector<int>());
}

TEST_F(ProgressEngineTest, WaitForABackgroundOperationSleeps) {
  Event gate;
  const PendingPtr op = engine_->add_background([&](Deadline) { return gate.wait(); });
  const std::chrono::milliseconds before = cpu_time_of_this_thread();
  EXPECT_FALSE(op->wait_until(Deadline::in(200ms)));
  EXPECT_LT(cpu_time_of_this_thread() - before, 50ms) << "the thread polled instead of sleeping";
  gate.set();
  EXPECT_TRUE(op->wait_until(Deadline::in(20s)));
}

TEST_F(ProgressEngineTest, WaitBlocksWhileAnotherThreadAdvances) {
  Event entered, gate;
  const PendingPtr first = engine_->add([&](Deadline deadline) {
    if (deadline.expired()) return false;  // called by add()
    entered.set();
    EXPECT_TRUE(gate.wait());
    return true;
  });
  const PendingPtr second = engine_->add(numbered(2));
  limit_ = 2;
  std::thread waiter([&] { EXPECT_TRUE(first->wait_until(Deadline::in(20s))); });
  EXPECT_TRUE(entered.wait());
  EXPECT_FALSE(second->wait_until(Deadline::in(5ms)));
  std::thread opener([&] { gate.set(); });
  EXPECT_TRUE(second->wait_until(Deadline::in(20s)));
  EXPECT_TRUE(first->done());
  EXPECT_EQ(order_, std::vector<int>{2});
  opener.join();
  waiter.join();
}

TEST_F(ProgressEngineTest, WaitEndsWhileAnotherThreadAdvancesALaterOperation) {
  Event entered, waiting, seen;
  bool first_was_seen = false;
  const PendingPtr first = engine_->add([&](Deadline deadline) {
    if (deadline.expired()) return false;  // called by add()
    entered.set();
    EXPECT_TRUE(waiting.wait());
    std::this_thread::sleep_for(
        20ms);  // so that the other thread waits, although the test is also valid if it does not
    return true;
  });
  const PendingPtr second = engine_->add([&](Deadline) {
    first_was_seen = seen.wait(5s);
    return true;
  });
  std::thread advancing([&] { EXPECT_TRUE(second->wait_until(Deadline::in(20s))); });
  EXPECT_TRUE(entered.wait());
  waiting.set();
  EXPECT_TRUE(first->wait_until(Deadline::in(20s)));
  seen.set();
  advancing.join();
  EXPECT_TRUE(first_was_seen);
}

}  // namespace
}  // namespace lockstep::comm::shm
