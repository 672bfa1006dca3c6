#include "tests/support/spawn.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "lockstep/base/parse.h"

namespace lockstep::tests {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr const char* kMarkName = "LOCKSTEP_TEST_MARK";

std::string file_text(const std::string& path) {
  const std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();  // an iterator would throw if the process ends while its file in /proc is being read
  return text.str();
}

/// Returns the fields of /proc/PID/stat after the name: state, parent, ...; nothing if the process has ended.
std::vector<std::string> stat_fields(pid_t pid) {
  const std::string text = file_text("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t close = text.rfind(") ");
  return close == std::string::npos ? std::vector<std::string>()
                                    : base::split(std::string_view(text).substr(close + 2), ' ');
}

std::vector<pid_t> all_pids() {
  std::vector<pid_t> pids;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), ::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr)
    if (const auto pid = base::parse_int(entry->d_name)) pids.push_back(static_cast<pid_t>(*pid));
  return pids;
}

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> prefixes) {
  for (const std::string_view prefix : prefixes)
    if (text.starts_with(prefix)) return true;
  return false;
}

std::vector<std::string> environment_of(const SpawnOptions& options, const std::string& mark) {
  std::vector<std::string> all = {mark};
  for (char** entry = ::environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const std::string name(text.substr(0, text.find('=')));
    if (starts_with_any(name, {"LOCKSTEP_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_"}) ||
        options.env.contains(name) || name == "RANK" || name == "WORLD_SIZE" || name == "LOCAL_RANK" ||
        name == "LOCAL_WORLD_SIZE" || name == "NODE_RANK" || name == "OMP_NUM_THREADS")
      continue;
    all.emplace_back(text);
  }
  for (const auto& [name, value] : options.env) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (std::string& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

void short_pause() { std::this_thread::sleep_for(2ms); }

Process::Process(const SpawnOptions& options) : read_out_(options.read_out), start_(Deadline::Clock::now()) {
  static std::atomic<int> number{0};
  mark_ = std::string(kMarkName) + "=" + std::to_string(::getpid()) + "." + std::to_string(++number);
  base::Pipe out = base::make_pipe();
  base::Pipe err = base::make_pipe();
  std::vector<std::string> arguments = options.argv;
  std::vector<std::string> environment = environment_of(options, mark_);
  std::vector<char*> argv = pointers(arguments);
  std::vector<char*> envp = pointers(environment);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid_ == 0) {
    ::setpgid(0, 0);
    for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::dup2(options.out >= 0 ? options.out : out.write.get(), STDOUT_FILENO);
    ::dup2(options.err >= 0 ? options.err : err.write.get(), STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  pipes_[0] = std::move(out.read);
  pipes_[1] = std::move(err.read);
}

Process::~Process() {
  if (!waited_) ADD_FAILURE() << "process " << pid_ << " was not waited for";
  const bool clean = wait_for_live_count(0, Deadline::in(waited_ ? 2s : 0s));
  for (const pid_t pid : live_processes()) {
    if (waited_) ADD_FAILURE() << "process " << pid << " is still running: " << command_of(pid);
    ::kill(pid, SIGKILL);
  }
  if (!clean) wait_for_live_count(0, Deadline::in(5s));
  if (!waited_) eventually(Deadline::in(5s), [&] { return reap().has_value(); });
}

void Process::signal(int number) const { ::kill(pid_, number); }

void Process::read_some(Deadline deadline) {
  pollfd entries[2];
  for (int i = 0; i < 2; ++i) entries[i] = {i == 0 && !read_out_ ? -1 : pipes_[i].get(), POLLIN, 0};
  ::poll(entries, 2, deadline.poll_ms(5ms));
  for (int i = 0; i < 2; ++i) {
    char bytes[1 << 16];
    if (!entries[i].revents) continue;
    const ssize_t size = ::read(pipes_[i].get(), bytes, sizeof bytes);
    if (size > 0)
      texts_[i].append(bytes, static_cast<std::size_t>(size));
    else if (size == 0)
      pipes_[i].reset();
  }
}

bool Process::wait_for(std::string_view text, Deadline deadline) {
  const auto has_text = [&] {
    return texts_[0].find(text) != std::string::npos || texts_[1].find(text) != std::string::npos;
  };
  while (!has_text() && (pipes_[0] || pipes_[1]) && !deadline.expired()) read_some(deadline);
  return has_text();
}

std::optional<int> Process::reap() {
  int status = 0;
  return ::waitpid(pid_, &status, WNOHANG) == pid_ ? std::optional(status) : std::nullopt;
}

ProcessResult Process::wait(Deadline deadline) {
  std::optional<int> status;
  while (!(status = reap())) {
    if (deadline.expired()) {
      ADD_FAILURE() << "process " << pid_ << " did not end in time; stdout:\n"
                    << texts_[0] << "\nstderr:\n"
                    << texts_[1];
      ::kill(pid_, SIGKILL);
      deadline = Deadline::in(5s);
    }
    read_some(deadline);
  }
  waited_ = true;
  ProcessResult exit;
  exit.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now() - start_);
  // The process has ended, so its output is in the pipes. Read it until the pipes are closed. Processes that the child
  // left may keep them open: the destructor finds those.
  const Deadline rest = Deadline::in(2s);
  while ((pipes_[1] || (read_out_ && pipes_[0])) && !rest.expired()) read_some(rest);
  exit.signal = WIFSIGNALED(*status) ? WTERMSIG(*status) : 0;
  exit.code = WIFSIGNALED(*status) ? 128 + exit.signal : WEXITSTATUS(*status);
  exit.out = texts_[0];
  exit.err = texts_[1];
  return exit;
}

std::vector<pid_t> Process::live_processes() const {
  std::vector<pid_t> found;
  const std::string needle = mark_ + '\0';
  for (const pid_t pid : all_pids()) {
    const std::string environment = file_text("/proc/" + std::to_string(pid) + "/environ");
    if ((environment + '\0').find(needle) == std::string::npos) continue;
    const auto fields = stat_fields(pid);
    if (!fields.empty() && fields[0] != "Z" && fields[0] != "X") found.push_back(pid);
  }
  return found;
}

bool Process::wait_for_live_count(std::size_t count, Deadline deadline) const {
  return eventually(deadline, [&] { return live_processes().size() == count; });
}

ProcessResult run_process(const SpawnOptions& options, std::chrono::seconds limit) {
  Process process(options);
  return process.wait(Deadline::in(limit));
}

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  for (const pid_t pid : all_pids()) {
    const auto fields = stat_fields(pid);
    if (fields.size() > 1 && fields[0] != "Z" && fields[1] == std::to_string(parent)) children.push_back(pid);
  }
  return children;
}

std::string command_of(pid_t pid) {
  std::string text = file_text("/proc/" + std::to_string(pid) + "/cmdline");
  for (char& c : text)
    if (c == '\0') c = ' ';
  return text;
}

}  // namespace lockstep::tests
