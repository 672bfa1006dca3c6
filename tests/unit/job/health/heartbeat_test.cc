#include "lockstep/job/health/heartbeat.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job::health {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

/// Blocks until this process has published `count` more heartbeats.
void wait_for_heartbeats(std::uint64_t count) {
  const base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  const std::uint64_t until = page.heartbeats + count;
  const Deadline limit = Deadline::in(20s);
  while (page.heartbeats < until && !limit.expired()) std::this_thread::sleep_for(5ms);
  ASSERT_GE(page.heartbeats, until);
}

TEST(Heartbeat, PublishesProgressOnly) {
  const auto store = std::make_shared<LocalStore>();
  base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  page.alive_count += 3;
  const Heartbeat heartbeat(store, 5);
  wait_for_heartbeats(2);
  const std::string first = read_progress(*store, {5}, Deadline::in(1s));
  EXPECT_NE(first, "- ");
  wait_for_heartbeats(2);
  EXPECT_EQ(read_progress(*store, {5}, Deadline::in(1s)), first);
  page.alive_count += 1;
  wait_for_heartbeats(2);
  EXPECT_NE(read_progress(*store, {5}, Deadline::in(1s)), first);
  EXPECT_EQ(read_progress(*store, {6, 7}, Deadline::in(1s)), "- - ");
}

TEST(Heartbeat, BusyCountsAsProgress) {
  const auto store = std::make_shared<LocalStore>();
  base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  page.busy_depth = 1;
  const Heartbeat heartbeat(store, 0);
  wait_for_heartbeats(2);
  const std::string first = read_progress(*store, {0}, Deadline::in(1s));
  wait_for_heartbeats(2);
  EXPECT_NE(read_progress(*store, {0}, Deadline::in(1s)), first);
  page.busy_depth = 0;
}

TEST(Heartbeat, BeatsWithoutAStore) {
  const Heartbeat heartbeat(nullptr, 0);
  wait_for_heartbeats(1);
}

std::atomic<int> handled{0}, handled_elsewhere{0};
pthread_t here;

TEST(Heartbeat, ThreadBlocksAllSignals) {
  here = ::pthread_self();
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {
    ++handled;
    if (!::pthread_equal(here, ::pthread_self())) ++handled_elsewhere;
  };
  ::sigaction(SIGUSR1, &action, &before);
  const Heartbeat heartbeat(nullptr, 0);
  sigset_t usr1, old;
  sigemptyset(&usr1);
  sigaddset(&usr1, SIGUSR1);
  // While this thread blocks the signal, the kernel delivers it to any thread that does not.
  ::pthread_sigmask(SIG_BLOCK, &usr1, &old);
  ::kill(::getpid(), SIGUSR1);
  wait_for_heartbeats(1);
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  EXPECT_EQ(handled, 1);
  EXPECT_EQ(handled_elsewhere, 0);
  ::sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace lockstep::job::health
