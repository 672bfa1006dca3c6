#include "lockstep/launch/process/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::launcher::process {
void open_standard_descriptors() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd > STDERR_FILENO) ::close(fd);
}

void become_subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<int> handled_signals() {
  std::vector<int> handled = {SIGCHLD, SIGUSR1, SIGUSR2};
  for (const int signal : {SIGINT, SIGQUIT, SIGTERM, SIGHUP}) {
    struct sigaction action{};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) handled.push_back(signal);
  }
  return handled;
}

base::Fd make_signal_fd(const std::vector<int>& signals) {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS, SIGTSTP, SIGCONT})
    sigdelset(&all, fault);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  sigset_t read;
  sigemptyset(&read);
  for (const int signal : signals) sigaddset(&read, signal);
  base::Fd fd(::signalfd(-1, &read, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw base::SystemError("cannot create a descriptor for signals", errno);
  return fd;
}

std::optional<int> read_signal(int fd) {
  signalfd_siginfo info{};
  if (::read(fd, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

bool has_children() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

std::optional<ReapedChild> try_reap() {
  ReapedChild reaped;
  do reaped.pid = ::waitpid(-1, &reaped.status, WNOHANG);
  while (reaped.pid < 0 && errno == EINTR);
  if (reaped.pid < 0) return std::nullopt;
  return reaped;
}

}  // namespace lockstep::launcher::process
