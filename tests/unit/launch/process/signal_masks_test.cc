#include "lockstep/launch/process/signal_masks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

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

void set_all(int how, std::chrono::microseconds time) {
  sigset_t set;
  ::sigfillset(&set);
  ::sigprocmask(how, &set, nullptr);
  std::this_thread::sleep_for(time);
}

bool has_ended(pid_t pid) { return ::waitpid(pid, nullptr, WNOHANG) == pid; }

TEST(SignalMasks, Handlers) {
  const Child handles([] { ::signal(SIGUSR1, [](int) { ::_exit(7); }); }), blocks(block);
  EXPECT_TRUE(catches_signal(handles.pid(), SIGUSR1));
  EXPECT_FALSE(catches_signal(handles.pid(), SIGUSR2));
  EXPECT_FALSE(catches_signal(blocks.pid(), SIGUSR1));
  EXPECT_FALSE(catches_signal(1 << 30, SIGUSR1));
}

// As a process does that starts many others.
TEST(SignalMasks, ProcessThatBlocksItForMomentsDoesNotGetIt) {
  const Child starts([] { ::signal(SIGUSR1, SIG_DFL); }, [] { set_all(SIG_BLOCK, 1ms), set_all(SIG_UNBLOCK, 6ms); });
  for (int i = 0; i < 100; ++i, std::this_thread::sleep_for(1ms)) {
    signal_first_expecting({{starts.pid()}}, SIGUSR1);
    ASSERT_FALSE(has_ended(starts.pid()));
  }
}

TEST(SignalMasks, TheFirstThatExpectsItGetsIt) {
  const Child plain([] { ::signal(SIGUSR1, SIG_DFL); }), ignores([] { ::signal(SIGUSR1, SIG_IGN); });
  const Child first([] { ::signal(SIGUSR1, [](int) { ::_exit(7); }); });
  const Child second([] { ::signal(SIGUSR1, [](int) { ::_exit(8); }); });
  const Child blocks(block, [] {
    sigset_t pending;
    ::sigpending(&pending);
    if (::sigismember(&pending, SIGUSR1) == 1) ::_exit(9);
    ::usleep(1000);
  });
  signal_first_expecting({{plain.pid(), ignores.pid(), first.pid(), second.pid()}, {plain.pid(), blocks.pid()}, {}},
                         SIGUSR1);
  for (const auto& [pid, code] : {std::pair(first.pid(), 7), std::pair(blocks.pid(), 9)}) {
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == code) << status;
  }
  for (const pid_t pid : {plain.pid(), ignores.pid(), second.pid()}) EXPECT_FALSE(has_ended(pid));
}

}  // namespace
}  // namespace lockstep::launcher::process
