#include "lockstep/launch/process/python_stacks.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/signal_masks.h"

namespace lockstep::launcher::process {
namespace {

constexpr std::chrono::milliseconds kStackPollInterval(2), kSettled(20);
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
constexpr std::string_view kTitle = "Python stacks of ";

std::string first_line(const std::string& path) {
  std::string text;
  std::getline(std::ifstream(path), text);
  return text;
}

base::Fd open_stack_file(pid_t pid) {
  const std::string link = "/memfd:" + std::string(kPythonStackFile) + " (deleted)";
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return {};
  while (const dirent* entry = ::readdir(entries.get())) {
    char text[64];
    const ssize_t size = ::readlinkat(::dirfd(entries.get()), entry->d_name, text, sizeof text);
    if (size < 0 || std::string_view(text, static_cast<std::size_t>(size)) != link) continue;
    return base::Fd(::open((folder + "/" + entry->d_name).c_str(), O_RDONLY | O_CLOEXEC));
  }
  return {};
}

std::size_t size_of(const base::Fd& file) {
  struct stat status{};
  return ::fstat(file.get(), &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
}

/// Returns what the process writes to `file` after the signal, once it has written nothing for a moment.
std::string stacks_of(pid_t pid, const base::Fd& file, base::Deadline deadline) {
  const std::size_t begin = size_of(file);  // it may have been asked before, and shares the file with its parent
  if (::kill(pid, kPythonStackSignal) != 0) return "";
  std::size_t end = begin;
  for (auto changed = std::chrono::steady_clock::now(); !deadline.expired();) {
    std::this_thread::sleep_for(kStackPollInterval);
    const std::size_t size = size_of(file);
    if (size != end) changed = std::chrono::steady_clock::now();
    end = size;
    if (end > begin && std::chrono::steady_clock::now() - changed >= kSettled) break;
  }
  std::string text(std::min(end - std::min(begin, end), kMaxBytes), '\0');
  const ssize_t size = ::pread(file.get(), text.data(), text.size(), static_cast<off_t>(begin));
  text.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
  return text;
}

/// A call in a line of faulthandler: `  File "train.py", line 42 in main`.
struct Call {
  std::string file, line, function;
};

std::string to_text(const Call& call) { return call.file + ":" + call.line + " in " + call.function; }

std::optional<Call> parse_call(std::string_view text) {
  constexpr std::string_view kStart = "  File \"", kNumber = "\", line ", kIn = " in ";
  if (!text.starts_with(kStart)) return std::nullopt;
  text.remove_prefix(kStart.size());
  const std::size_t line = text.rfind(kNumber);
  if (line == std::string_view::npos) return std::nullopt;
  const std::string_view rest = text.substr(line + kNumber.size());
  const std::size_t in = rest.find(kIn);
  if (in == std::string_view::npos) return std::nullopt;
  return Call{std::string(text.substr(0, line)), std::string(rest.substr(0, in)),
              std::string(rest.substr(in + kIn.size()))};
}

bool is_installed(std::string_view file) {
  return file.starts_with("<") || file.find("/_lockstep_hook/") != std::string_view::npos ||
         file.find("/site-packages/") != std::string_view::npos ||
         file.find("/dist-packages/") != std::string_view::npos || file.find("/lib/python3") != std::string_view::npos;
}

/// The newest call in the main thread of a process, and the newest that is in no installed package.
struct ProcessCalls {
  std::string name;  // "process 4711 (python)"
  std::optional<Call> newest = {}, own = {};

  const std::optional<Call>& best() const { return own ? own : newest; }
};

/// Returns whether a child has not returned from the os.fork() that made it: multiprocessing calls it in this function,
/// which then calls others.
bool is_in_fork(const ProcessCalls& child) {
  return child.newest && child.newest->file.ends_with("/multiprocessing/popen_fork.py") &&
         child.newest->function == "_launch";
}

/// Python lists the main thread last.
std::vector<ProcessCalls> last_threads(const std::vector<std::string>& lines) {
  std::vector<ProcessCalls> processes;
  for (const std::string& line : lines) {
    if (line.starts_with(kTitle)) {
      processes.push_back({line.substr(kTitle.size(), line.find(", newest", kTitle.size()) - kTitle.size())});
    } else if (processes.empty()) {
      continue;
    } else if (line.starts_with("Thread 0x") || line.starts_with("Current thread 0x")) {
      processes.back().newest = processes.back().own = std::nullopt;
    } else if (const auto call = parse_call(line)) {
      if (!processes.back().newest) processes.back().newest = call;
      if (!processes.back().own && !is_installed(call->file)) processes.back().own = call;
    }
  }
  return processes;
}

}  // namespace

std::string read_python_stacks(const std::vector<pid_t>& pids, base::Deadline deadline) {
  std::string all;
  for (const pid_t pid : pids) {
    const base::Fd file = catches_signal(pid, kPythonStackSignal) ? open_stack_file(pid) : base::Fd();
    if (!file) continue;
    const std::string text = stacks_of(pid, file, deadline);
    if (text.empty()) continue;
    const std::string name = first_line("/proc/" + std::to_string(pid) + "/comm");
    all += std::string(kTitle) + "process " + std::to_string(pid) + " (" + base::escaped(name, 64) +
           "), newest call first:\n" + text + "\n";
  }
  return all;
}

std::string python_location(std::string_view stacks) {
  const std::vector<ProcessCalls> processes = last_threads(base::split(stacks, '\n'));
  if (processes.empty() || !processes[0].best()) return "";
  std::string text = to_text(*processes[0].best());
  for (std::size_t i = 1; i < processes.size(); ++i)
    if (is_in_fork(processes[i]))
      return text + "; its " + processes[i].name +
             " hangs in os.fork(), as CPython before 3.10.15 and 3.11.10 may: " + "use a newer Python, or --bind none";
  // A program that waits for a worker says nothing about why.
  for (std::size_t i = 1; i < processes.size(); ++i)
    if (processes[i].own) return text + "; its " + processes[i].name + " is at " + to_text(*processes[i].own);
  return text;
}

}  // namespace lockstep::launcher::process
