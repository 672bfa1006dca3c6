#include "lockstep/launch/process/signal_masks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <thread>
#include <vector>

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

bool exits_with(pid_t pid, int code) {
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == code;
}

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
  EXPECT_TRUE(exits_with(first.pid(), 7) && exits_with(blocks.pid(), 9));
  for (const pid_t pid : {plain.pid(), ignores.pid(), second.pid()}) EXPECT_FALSE(has_ended(pid));
}

void handle() {
  ::signal(SIGTERM, [](int) { ::_exit(7); });
}
void do_not_handle() { ::signal(SIGTERM, SIG_DFL); }

// Workers of a DataLoader have a handler of torch, which ends them.
TEST(SignalMasks, WorkersThatHandleTheSignalAreNoProgram) {
  const Child rank(do_not_handle), worker(handle);
  const std::map<pid_t, ProcessCounters> processes = {{rank.pid(), {.parent = 1}},
                                                      {worker.pid(), {.parent = rank.pid()}}};
  for (const pid_t joined : {-1, rank.pid()})
    EXPECT_EQ(signal_programs({{rank.pid(), joined}}, processes, SIGTERM), std::vector<bool>{false});
  EXPECT_FALSE(has_ended(rank.pid()) || has_ended(worker.pid()));
}

TEST(SignalMasks, OnlyTheProgramGetsTheSignal) {
  for (const bool has_joined : {false, true}) {
    const Child rank(handle), worker(handle), other(do_not_handle);
    const std::map<pid_t, ProcessCounters> processes = {
        {rank.pid(), {.parent = 1}}, {worker.pid(), {.parent = rank.pid()}}, {other.pid(), {.parent = 1}}};
    EXPECT_EQ(signal_programs({{other.pid(), -1}, {rank.pid(), has_joined ? rank.pid() : -1}}, processes, SIGTERM),
              (std::vector<bool>{false, true}));
    EXPECT_TRUE(exits_with(rank.pid(), 7));
    EXPECT_FALSE(has_ended(worker.pid()) || has_ended(other.pid()));
  }
}

// A program between the agent and the rank, as uv run or conda run.
TEST(SignalMasks, TheProcessesAboveTheProgramGetTheSignalIfTheyHandleIt) {
  const Child plain(do_not_handle), wrapper(handle), rank(handle), worker(handle);
  const std::map<pid_t, ProcessCounters> processes = {{plain.pid(), {.parent = 1}},
                                                      {wrapper.pid(), {.parent = plain.pid()}},
                                                      {rank.pid(), {.parent = wrapper.pid()}},
                                                      {worker.pid(), {.parent = rank.pid()}}};
  EXPECT_EQ(signal_programs({{plain.pid(), 1 << 30}}, processes, SIGTERM), std::vector<bool>{false});
  EXPECT_EQ(signal_programs({{plain.pid(), rank.pid()}}, processes, SIGTERM), std::vector<bool>{true});
  EXPECT_TRUE(exits_with(wrapper.pid(), 7) && exits_with(rank.pid(), 7));
  EXPECT_FALSE(has_ended(plain.pid()) || has_ended(worker.pid()));
}

}  // namespace
}  // namespace lockstep::launcher::process
