#include "lockstep/launch/process/activity.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "lockstep/base/fd.h"
#include "lockstep/base/thread.h"

namespace lockstep::launcher::process {
namespace {

using namespace std::chrono_literals;
using ::testing::UnorderedElementsAre;

/// A child that runs `work` in a child of its own, so that the counters of the tree are needed.
class Grandchild {
 public:
  explicit Grandchild(const std::function<void()>& work) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::fork() == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) work();
    }
    for (;;) ::pause();
  }
  ~Grandchild() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Grandchild(const Grandchild&) = delete;
  Grandchild& operator=(const Grandchild&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

/// Whether it is seen to work in one of the next seconds. The machine may be busy, so several are allowed.
bool works(pid_t pid) {
  for (int i = 0; i < 20; ++i) {
    const Usage before = usage_of_tree(pid, read_activity());
    std::this_thread::sleep_for(250ms);
    if (has_worked(before, usage_of_tree(pid, read_activity()), 250ms)) return true;
  }
  return false;
}

TEST(Activity, OwnThreadsDoNoWork) {
  const Grandchild spins([] {
    std::thread([] {
      base::name_own_thread("test");
      for (;;) {
      }
    }).join();
  });
  std::this_thread::sleep_for(50ms);
  for (int i = 0; i < 3; ++i) {  // as the agent measures: ticks of 10 ms make shorter times inexact
    const Usage before = usage_of_tree(spins.pid(), read_activity());
    std::this_thread::sleep_for(1s);
    EXPECT_FALSE(has_worked(before, usage_of_tree(spins.pid(), read_activity()), 1s));
  }
}

TEST(Activity, SleepIsNoWork) {
  const Grandchild sleeps([] { std::this_thread::sleep_for(1s); });
  std::this_thread::sleep_for(50ms);
  for (int i = 0; i < 3; ++i) {
    const Usage before = usage_of_tree(sleeps.pid(), read_activity());
    std::this_thread::sleep_for(250ms);
    EXPECT_FALSE(has_worked(before, usage_of_tree(sleeps.pid(), read_activity()), 250ms));
  }
}

TEST(Activity, ComputationIsWork) {
  const Grandchild computes([] {
    static volatile int value = 0;
    value = value + 1;
  });
  EXPECT_TRUE(works(computes.pid()));
}

TEST(Activity, BytesInFilesAreWork) {
  const Grandchild writes([] {
    const base::Fd file(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    const std::string block(2048, 'x');
    [[maybe_unused]] const auto written = ::write(file.get(), block.data(), block.size());
    std::this_thread::sleep_for(50ms);
  });
  EXPECT_TRUE(works(writes.pid()));
}

// As a download does: with recv(2), which the kernel does not count for the process.
TEST(Activity, BytesOnConnectionsAreWork) {
  const base::Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int listening = listener.get();
  const Grandchild receives([listening] {
    static const int connection = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    char bytes[2048];
    [[maybe_unused]] const auto size = ::recv(connection, bytes, sizeof bytes, 0);
  });
  // Made after the fork: only the other end of the connection is that process's.
  const base::Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  std::jthread sender([&](const std::stop_token& stop) {
    const std::string block(2048, 'x');
    while (!stop.stop_requested() && ::send(client.get(), block.data(), block.size(), MSG_NOSIGNAL) > 0)
      std::this_thread::sleep_for(50ms);
  });
  if (read_activity().connections.empty()) GTEST_SKIP() << "this kernel does not list connections";
  EXPECT_TRUE(works(receives.pid()));
}

TEST(Activity, Thresholds) {
  EXPECT_TRUE(has_worked({}, {.cpu_time = 50ms}, 1s));
  EXPECT_FALSE(has_worked({}, {.cpu_time = 50ms}, 2s));
  EXPECT_TRUE(has_worked({}, {.bytes = 4096}, 1s));
  EXPECT_FALSE(has_worked({}, {.bytes = 4095}, 1s));
  EXPECT_FALSE(has_worked({.cpu_time = 900ms, .bytes = 10000}, {.cpu_time = 100ms, .bytes = 0}, 1s));
  EXPECT_FALSE(has_worked({}, {.cpu_time = 50ms}, 0s));
}

TEST(Activity, Tree) {
  const std::map<pid_t, ProcessCounters> all = {{1, {0, 0ms}}, {2, {1, 0ms}}, {3, {2, 0ms}},
                                                {4, {1, 0ms}}, {5, {6, 0ms}}, {6, {5, 0ms}}};
  EXPECT_THAT(tree_of(2, all), UnorderedElementsAre(2, 3));
  EXPECT_THAT(tree_of(5, all), UnorderedElementsAre(5, 6));
  EXPECT_THAT(tree_of(9, all), UnorderedElementsAre(9));
}

}  // namespace
}  // namespace lockstep::launcher::process
