#include "bench/harness/benchmark_job.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <sstream>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::bench {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr std::size_t kTail = 2000;  // bytes of a failed job's output in its error

volatile std::sig_atomic_t stop_signal = 0;  // global because a signal handler sets it

void throw_if_interrupted() {
  if (const int signal = std::exchange(stop_signal, 0))
    throw base::Error(base::Cause::kInterrupted,
                      std::string("stopped by ") + (signal == SIGINT ? "SIGINT" : "SIGTERM"));
}

std::vector<std::string> environment_with(const std::map<std::string, std::string>& env) {
  std::vector<std::string> all;
  for (const std::string& variable : launcher::process::current_environment())
    if (!env.contains(std::string(launcher::process::variable_name(variable)))) all.push_back(variable);
  for (const auto& [name, value] : env)
    if (!value.empty()) all.push_back(name + "=" + value);
  return all;
}

/// Creates a named pipe and opens it for reading and writing, so that opening does not block if the rank failed to
/// start.
base::Fd make_fifo(const std::string& path) {
  if (::mkfifo(path.c_str(), 0600) != 0) throw base::SystemError("cannot create the pipe " + path, errno);
  base::Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd) throw base::SystemError("cannot open the pipe " + path, errno);
  return fd;
}

Implementation replace_prefix(Implementation implementation, const std::string& prefix) {
  for (std::string& word : implementation.argv)
    if (word == kPrefix) word = prefix;
  return implementation;
}

}  // namespace

pid_t start_process(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env,
                    const std::string& output) {
  const base::Fd out(
      ::open(output.empty() ? "/dev/null" : output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const base::Fd in(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!out || !in) throw base::SystemError("cannot open " + output, errno);
  return launcher::process::spawn({.path = argv[0],
                                   .argv = argv,
                                   .environment = environment_with(env),
                                   .in = in.get(),
                                   .out = out.get(),
                                   .err = out.get(),
                                   .death_signal = SIGTERM});
}

bool wait_for(pid_t pid, Deadline deadline, int* status) {
  const base::Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  do {
    if (::waitpid(pid, status, WNOHANG) == pid) return true;
    throw_if_interrupted();
    pollfd entry{pidfd.get(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_ms(pidfd ? 1s : 10ms));
  } while (!deadline.expired());
  return ::waitpid(pid, status, WNOHANG) == pid;
}

void throw_on_signals() {
  struct sigaction action{};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

BenchmarkJob::BenchmarkJob(const Implementation& implementation, const std::string& folder)
    : implementation_(replace_prefix(implementation, folder + "/" + implementation.name)),
      prefix_(folder + "/" + implementation.name) {
  for (int rank = 0; rank < implementation_.ranks; ++rank)
    request_fds_.push_back(make_fifo(prefix_ + "." + std::to_string(rank)));
  result_fd_ = make_fifo(prefix_ + ".answers");
  pid_ = start_process(implementation_.argv, implementation_.env, prefix_ + ".log");
}

BenchmarkJob::~BenchmarkJob() {
  try {
    end(Deadline::in(1s));
  } catch (const base::Error&) {  // interrupted again: kill at once
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, WNOHANG);
  }
}

std::vector<double> BenchmarkJob::measure(const std::vector<std::int64_t>& request, Deadline deadline) {
  std::string line;
  for (const std::int64_t number : request) line += (line.empty() ? "" : " ") + std::to_string(number);
  line += "\n";
  for (const base::Fd& fd : request_fds_)
    if (::write(fd.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      fail("does not read its requests");
  return read_result(deadline);
}

std::vector<double> BenchmarkJob::read_result(Deadline deadline) {
  while (unread_.find('\n') == std::string::npos) {
    char buffer[4096];
    const ssize_t size = ::read(result_fd_.get(), buffer, sizeof buffer);
    if (size > 0) {
      unread_.append(buffer, static_cast<std::size_t>(size));
      continue;
    }
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      fail(WIFEXITED(status) ? "exited with " + std::to_string(WEXITSTATUS(status))
                             : "was killed by signal " + std::to_string(WTERMSIG(status)));
    }
    throw_if_interrupted();
    if (deadline.expired()) fail("sent no result in time");
    pollfd entry{result_fd_.get(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_ms(200ms));
  }
  const std::size_t end = unread_.find('\n');
  std::istringstream line(unread_.substr(0, end));
  unread_.erase(0, end + 1);
  std::vector<double> numbers;
  for (double number = 0; line >> number;) numbers.push_back(number);
  if (!line.eof()) fail("sent a result that is not a list of numbers");
  return numbers;
}

std::uint64_t BenchmarkJob::pss_bytes() const {
  std::uint64_t kilobytes = 0;
  for (int rank = 0; rank < implementation_.ranks; ++rank) {
    std::string pid;
    std::ifstream(prefix_ + "." + std::to_string(rank) + ".pid") >> pid;
    std::ifstream rollup("/proc/" + pid + "/smaps_rollup");
    std::string line;
    bool found = false;
    while (!found && std::getline(rollup, line)) found = line.rfind("Pss:", 0) == 0;
    if (!found)
      throw base::SystemError(
          implementation_.name + ": cannot read the memory of rank " + std::to_string(rank) + ", process " + pid,
          errno);
    kilobytes += std::stoull(line.substr(4));
  }
  return kilobytes * 1024;
}

void BenchmarkJob::end(Deadline deadline) {
  request_fds_.clear();
  if (pid_ < 0) return;
  int status = 0;
  // SIGTERM first: a launcher stops its ranks, whereas a killed launcher may leave them.
  if (!wait_for(pid_, deadline, &status)) {
    ::kill(pid_, SIGTERM);
    if (!wait_for(pid_, Deadline::in(15s), &status)) {
      ::kill(pid_, SIGKILL);
      wait_for(pid_, Deadline::in(5s), &status);
    }
  }
  pid_ = -1;
}

void BenchmarkJob::fail(const std::string& what) const {
  std::ifstream log(prefix_ + ".log");
  std::string output((std::istreambuf_iterator<char>(log)), {});
  if (output.size() > kTail) output.erase(0, output.size() - kTail);
  throw base::CommError(base::Cause::kPeerUnreachable, "bench", -1, -1,
                        implementation_.name + " " + what + (output.empty() ? "" : "; its last output:\n" + output));
}

}  // namespace lockstep::bench
