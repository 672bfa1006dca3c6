#include "lockstep/launch/process/signal_masks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace lockstep::launcher::process {
namespace {

using namespace std::chrono_literals;

/// A child that has called `prepare` before this is constructed, and then calls `work` again and again.
class Child {
 public:
  explicit Child(void (*prepare)(), void (*work)() = [] { ::pause(); }) {
    int ready[2];
    if (::pipe(ready) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      prepare();
      [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
      for (;;) work();
    }
    char byte;
    [[maybe_unused]] const auto got = ::read(ready[0], &byte, 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

void block() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGUSR1);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
}

TEST(SignalMasks, HandledBlockedIgnoredAndDefault) {
  const Child handles([] { ::signal(SIGUSR1, [](int) { ::_exit(7); }); });
  const Child blocks(block), ignores([] { ::signal(SIGUSR1, SIG_IGN); }), plain([] { ::signal(SIGUSR1, SIG_DFL); });
  EXPECT_TRUE(catches_signal(handles.pid(), SIGUSR1));
  EXPECT_FALSE(catches_signal(handles.pid(), SIGUSR2));
  EXPECT_TRUE(expects_signal(handles.pid(), SIGUSR1));
  EXPECT_FALSE(catches_signal(blocks.pid(), SIGUSR1));
  EXPECT_TRUE(expects_signal(blocks.pid(), SIGUSR1));
  EXPECT_FALSE(expects_signal(ignores.pid(), SIGUSR1));
  EXPECT_FALSE(expects_signal(plain.pid(), SIGUSR1));
  EXPECT_FALSE(expects_signal(1 << 30, SIGUSR1));
}

void set_all(int how, std::chrono::microseconds time) {
  sigset_t set;
  ::sigfillset(&set);
  ::sigprocmask(how, &set, nullptr);
  std::this_thread::sleep_for(time);
}

// As a process does that starts many others.
TEST(SignalMasks, ProcessThatBlocksItForMomentsDoesNotExpectIt) {
  const Child starts([] { ::signal(SIGUSR1, SIG_DFL); }, [] { set_all(SIG_BLOCK, 500us), set_all(SIG_UNBLOCK, 6ms); });
  for (int i = 0; i < 80; ++i, std::this_thread::sleep_for(1ms)) ASSERT_FALSE(expects_signal(starts.pid(), SIGUSR1));
}

TEST(SignalMasks, TheFirstThatExpectsItGetsIt) {
  const Child plain([] { ::signal(SIGUSR1, SIG_DFL); });
  const Child first([] { ::signal(SIGUSR1, [](int) { ::_exit(7); }); });
  const Child second([] { ::signal(SIGUSR1, [](int) { ::_exit(8); }); });
  signal_first_expecting({plain.pid(), first.pid(), second.pid()}, SIGUSR1);
  int status = 0;
  ASSERT_EQ(::waitpid(first.pid(), &status, 0), first.pid());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  for (const pid_t pid : {plain.pid(), second.pid()}) EXPECT_EQ(::waitpid(pid, nullptr, WNOHANG), 0);
  signal_first_expecting({plain.pid()}, SIGUSR1);
  EXPECT_EQ(::waitpid(plain.pid(), nullptr, WNOHANG), 0);
}

}  // namespace
}  // namespace lockstep::launcher::process
