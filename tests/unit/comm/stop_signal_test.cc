#include "lockstep/comm/stop_signal.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace lockstep::comm {
namespace {

/// Forks a child that runs `function` and exits with its result. Returns the child's status.
template <typename Function>
int status_of_child(const Function& function) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(function());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return status;
}

// In a process of its own, because the handlers stay.
TEST(StopSignal, ThatReachesAChildDuringForkEndsIt) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    static int raised = 0;
    raised = signal;
    const int status = status_of_child([] {
      for (const int number : {SIGTERM, SIGUSR1, SIGINT}) ::signal(number, SIG_DFL);
      // Runs in the child before the handlers of stop_signal.cc, which are registered later.
      ::pthread_atfork(nullptr, nullptr, [] { ::raise(raised); });
      install_stop_signal_handlers();
      const int ended = status_of_child([] { return 0; });
      return WIFSIGNALED(ended) && WTERMSIG(ended) == raised && !has_stop_signal() ? 0 : 1;
    });
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << signal << ": " << status;
  }
}

}  // namespace
}  // namespace lockstep::comm
