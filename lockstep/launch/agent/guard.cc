#include "lockstep/launch/agent/guard.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/process/process.h"

namespace lockstep::launcher::agent {
namespace {

using base::Deadline;

/// Waits for the agent. Kills it if it still runs base::kGuardTimeout after the end of its channel, because it is
/// stopped or blocked in the kernel.
void watch_agent(pid_t agent, int channel, int signals, int& status) {
  Deadline ends_by = Deadline::never();  // bounded: by the end of the channel
  while (::waitpid(agent, &status, WNOHANG) == 0) {
    pollfd entries[] = {{ends_by.is_never() ? channel : -1, POLLRDHUP, 0}, {signals, POLLIN, 0}};
    ::poll(entries, 2, ends_by.poll_ms());
    while (process::read_signal(signals)) {
    }
    if (entries[0].revents) ends_by = Deadline::in(base::kGuardTimeout);
    if (!ends_by.expired()) continue;
    ::kill(agent, SIGKILL);
    ends_by = Deadline::in(base::kGuardTimeout);
  }
}

}  // namespace

void fork_guarded_agent() {
  process::become_subreaper();
  const pid_t agent = ::fork();
  if (agent < 0) throw base::SystemError("cannot start the agent", errno);
  if (agent == 0) return;
  const base::Fd signals = process::make_signal_fd({SIGCHLD});
  const base::Fd channel(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  // Only the agent uses stdin and stdout.
  const base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO}) ::dup2(null.get(), fd);
  int status = 0;
  watch_agent(agent, channel.get(), signals.get(), status);
  process::kill_descendants({}, Deadline::in(base::kUnkillableTimeout));
  ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

}  // namespace lockstep::launcher::agent
