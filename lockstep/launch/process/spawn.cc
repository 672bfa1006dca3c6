#include "lockstep/launch/process/spawn.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::launcher::process {
namespace {

/// Builds an argv or envp for execve() from `texts`, which must outlive it.
std::vector<char*> make_argv(const std::vector<std::string>& texts) {
  std::vector<char*> all;
  all.reserve(texts.size() + 1);
  for (const std::string& text : texts) all.push_back(const_cast<char*>(text.c_str()));
  all.push_back(nullptr);
  return all;
}

// The functions below run between fork() and exec(). They make only async-signal-safe calls, because other threads of
// this process may hold locks at the fork().

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
  if (soft == 0) return;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(soft, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

[[noreturn]] void exit_with_failure(const ChildSpec& spec, StartStep step) {
  const StartFailure failure{spec.id, step, errno};
  if (spec.failure >= 0) [[maybe_unused]]
    const auto written = ::write(spec.failure, &failure, sizeof failure);
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

[[noreturn]] void run_child(const ChildSpec& spec, pid_t parent, char* const* argv, char* const* environment) {
  ::setsid();
  if (spec.death_signal != 0) {
    ::prctl(PR_SET_PDEATHSIG, spec.death_signal);
    if (::getppid() != parent) ::_exit(127);  // the parent died before the prctl()
  }
  if (!bind_to(spec.cpus)) exit_with_failure(spec, StartStep::kBind);
  if (!spec.directory.empty() && ::chdir(spec.directory.c_str()) != 0) ::_exit(127);
  limit_files(spec.max_files);
  if (spec.in >= 0) ::dup2(spec.in, STDIN_FILENO);
  if (spec.out >= 0) ::dup2(spec.out, STDOUT_FILENO);
  if (spec.err >= 0) ::dup2(spec.err, STDERR_FILENO);
  close_on_exec_from(STDERR_FILENO + 1);
  if (spec.inherited >= 0) ::fcntl(spec.inherited, F_SETFD, 0);
  reset_signals();
  ::execve(spec.path.c_str(), argv, environment);
  exit_with_failure(spec, StartStep::kExec);
}

}  // namespace

pid_t spawn(const ChildSpec& spec) {
  const std::vector<char*> argv = make_argv(spec.argv), environment = make_argv(spec.environment);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw base::SystemError("cannot start " + spec.path, errno);
  if (pid == 0) run_child(spec, parent, argv.data(), environment.data());
  return pid;
}

int exec_program(const std::string& path, const std::vector<std::string>& argv) {
  ::execv(path.c_str(), make_argv(argv).data());
  return errno;
}

}  // namespace lockstep::launcher::process
