#include "lockstep/launch/process/process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep::launcher {
namespace {

/// Builds an argv or envp for execve() from the strings of `lists`, which must outlive it.
std::vector<char*> make_argv(const std::vector<const std::vector<std::string>*>& lists) {
  std::vector<char*> all;
  for (const auto* list : lists)
    for (const std::string& text : *list) all.push_back(const_cast<char*>(text.c_str()));
  all.push_back(nullptr);
  return all;
}

// The functions below run between fork() and exec(). They make only async-signal-safe calls, because the launcher has
// several threads.

void close_on_exec_from(unsigned first) {
  constexpr unsigned kCloexec = 1U << 2;  // CLOSE_RANGE_CLOEXEC
  if (::syscall(SYS_close_range, first, ~0U, kCloexec) == 0) return;
  // Kernels before 5.11 do not have CLOSE_RANGE_CLOEXEC.
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  for (int fd = static_cast<int>(first); fd < static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)); ++fd)
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

void reset_signals() {
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

void limit_files(std::uint64_t soft) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(soft, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

[[noreturn]] void exit_with_failure(int fd, int rank, StartStep step) {
  const StartFailure failure{rank, step, errno};
  [[maybe_unused]] const auto written = ::write(fd, &failure, sizeof failure);
  ::_exit(127);
}

bool bind_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return true;
  constexpr int kWords = 8192 / (8 * sizeof(unsigned long));
  unsigned long mask[kWords] = {};
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  for (const int cpu : cpus)
    if (cpu >= 0 && cpu < 8192) mask[static_cast<unsigned>(cpu) / kBits] |= 1UL << (static_cast<unsigned>(cpu) % kBits);
  return ::sched_setaffinity(0, sizeof mask, reinterpret_cast<cpu_set_t*>(mask)) == 0;
}

}  // namespace

AgentProcess spawn_agent(const std::string& path, const std::vector<std::string>& argv, const Environment& environment,
                         bool is_remote, std::uint64_t max_files) {
  const std::vector<char*> arguments = make_argv({&argv}), variables = make_argv({&environment});
  const pid_t launcher = ::getpid();
  base::Pipe in = base::make_pipe();
  base::Pipe out = base::make_pipe();
  base::Fd err;
  if (is_remote && !(err = base::Fd(::memfd_create("lockstep-ssh", MFD_CLOEXEC))))
    throw base::SystemError("cannot create a file for the messages of ssh", errno);
  const pid_t pid = ::fork();
  if (pid < 0) throw base::SystemError("cannot start the agent", errno);
  if (pid == 0) {
    ::setsid();
    if (is_remote) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (is_remote && ::getppid() != launcher) ::_exit(127);
    limit_files(max_files);
    ::dup2(in.read.get(), STDIN_FILENO);
    ::dup2(out.write.get(), STDOUT_FILENO);
    if (is_remote) ::dup2(err.get(), STDERR_FILENO);
    close_on_exec_from(3);
    reset_signals();
    ::execve(path.c_str(), arguments.data(), variables.data());
    ::_exit(127);
  }
  return {pid, std::move(in.write), std::move(out.read), std::move(err)};
}

pid_t spawn_rank(const JobPlan& job, const RankPlan& rank, const RankStreams& streams) {
  std::vector<char*> arguments = make_argv({&job.arguments, &rank.arguments});
  const std::vector<std::string> page = {"LOCKSTEP_PAGE=" + std::to_string(streams.page)};
  std::vector<char*> environment = make_argv({&job.environment, &rank.environment, &page});
  const pid_t agent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw base::SystemError("cannot start rank " + std::to_string(rank.rank), errno);
  if (pid > 0) return pid;

  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != agent) ::_exit(127);  // the agent died before the prctl() above
  if (!bind_to(rank.cpus)) exit_with_failure(streams.failure, rank.rank, StartStep::kBind);
  limit_files(streams.max_files);
  ::dup2(streams.in, STDIN_FILENO);
  ::dup2(streams.out, STDOUT_FILENO);
  ::dup2(streams.err, STDERR_FILENO);
  close_on_exec_from(3);
  ::fcntl(streams.page, F_SETFD, 0);
  reset_signals();
  ::execve(job.program.c_str(), arguments.data(), environment.data());
  exit_with_failure(streams.failure, rank.rank, StartStep::kExec);
}

pid_t spawn_tool(const std::string& path, const std::vector<std::string>& arguments, const Environment& environment,
                 const std::string& directory, const ToolStreams& streams) {
  std::vector<char*> argv = make_argv({&arguments});
  std::vector<char*> variables = make_argv({&environment});
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw base::SystemError("cannot start " + path, errno);
  if (pid > 0) return pid;
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  if (!directory.empty() && ::chdir(directory.c_str()) != 0) ::_exit(127);
  ::dup2(streams.in, STDIN_FILENO);
  ::dup2(streams.out, STDOUT_FILENO);
  ::dup2(streams.err, STDERR_FILENO);
  close_on_exec_from(3);
  reset_signals();
  ::execve(path.c_str(), argv.data(), variables.data());
  ::_exit(127);
}

Environment current_environment() {
  Environment all;
  for (char** variable = ::environ; *variable; ++variable) all.emplace_back(*variable);
  return all;
}

void open_standard_descriptors() {
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::open("/dev/null", O_RDWR);
  if (fd > STDERR_FILENO) ::close(fd);
}

void become_subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

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

}  // namespace lockstep::launcher
