#include "lockstep/launch/process/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/launch/process/activity.h"

namespace lockstep::launcher::process {
namespace {

std::vector<pid_t> descendants_except(const std::vector<pid_t>& spared) {
  const std::map<pid_t, ProcessCounters> processes = read_processes();
  const pid_t self = ::getpid();
  const auto below_us = [&](pid_t pid) {
    // The number of hops is bounded, because pids that are reused while /proc is read could form a cycle.
    for (std::size_t hops = 0; hops < processes.size(); ++hops) {
      if (std::ranges::find(spared, pid) != spared.end()) return false;
      const auto entry = processes.find(pid);
      if (entry == processes.end()) return false;
      pid = entry->second.parent;
      if (pid == self) return true;
    }
    return false;
  };
  std::vector<pid_t> found;
  for (const auto& [pid, counters] : processes)
    if (below_us(pid)) found.push_back(pid);
  return found;
}

}  // namespace

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

void check_proc() {
  char text[32];
  const ssize_t size = ::readlink("/proc/self", text, sizeof text);
  if (size > 0 && std::string_view(text, static_cast<std::size_t>(size)) == std::to_string(::getpid())) return;
  throw base::UsageError("/proc does not show the processes of this PID namespace",
                         "mount it there (mount -t proc proc /proc), or start the container with a /proc of its own");
}

std::vector<pid_t> descendants() { return descendants_except({}); }

std::vector<pid_t> kill_descendants(const std::vector<pid_t>& spared, base::Deadline deadline) {
  for (;;) {
    while (const auto reaped = try_reap())
      if (reaped->pid == 0) break;
    const std::vector<pid_t> left = descendants_except(spared);
    if (left.empty() || deadline.expired()) return left;
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
    // Wait for SIGCHLD, which is blocked. A process that is not our child yet sends none, hence the short limit.
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    const timespec limit{0, 5'000'000};
    ::sigtimedwait(&child, nullptr, &limit);
  }
}

}  // namespace lockstep::launcher::process
