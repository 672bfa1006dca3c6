#include "lockstep/launch/process/tools.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::process {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

// The interval at which waitpid() checks whether a tool has ended: a process that the tool leaves behind may keep its
// pipe open.
constexpr auto kPollInterval = 50ms;

/// Returns an unnamed file with `content`, positioned at its beginning.
base::Fd memory_file(std::string_view content) {
  base::Fd fd(::memfd_create("input", MFD_CLOEXEC));
  if (!fd) throw base::SystemError("cannot create a file for the input of a tool", errno);
  if (!base::write_all(fd.get(), content) || ::lseek(fd.get(), 0, SEEK_SET) != 0)
    throw base::SystemError("cannot write the input of a tool", errno);
  return fd;
}

class OutputPipe {
 public:
  explicit OutputPipe(std::string& text) : text_(text) {}

  /// Creates the pipe and returns the end that the tool writes to.
  base::Fd open() {
    base::Pipe pipe = base::make_pipe();
    base::set_nonblocking(pipe.read.get());
    read_ = std::move(pipe.read);
    return std::move(pipe.write);
  }
  void close() { read_.reset(); }
  int descriptor() const { return read_ ? read_.get() : -1; }

  void read_available() {
    char bytes[1 << 12];
    while (read_) {
      const ssize_t size = ::read(read_.get(), bytes, sizeof bytes);
      if (size < 0 && errno == EINTR) continue;
      if (size == 0) read_.reset();
      if (size <= 0) return;
      text_.append(bytes, std::min(static_cast<std::size_t>(size), kMaxOutputBytes - text_.size()));
    }
  }

 private:
  std::string& text_;
  base::Fd read_;
};

class RunningTool {
 public:
  RunningTool(const ToolCommand& call, ToolResult& result)
      : result_(result), deadline_(Deadline::in(call.limit)), out_(result.out), err_(result.err) {
    result_.path = call.path;
    if (call.path.empty()) return;
    try {
      const base::Fd in = memory_file(call.input), out = out_.open(), err = err_.open();
      pid_ = spawn({.path = call.path,
                    .argv = call.argv,
                    .environment = call.environment,
                    .directory = call.directory,
                    .in = in.get(),
                    .out = out.get(),
                    .err = err.get()});
    } catch (const base::SystemError& error) {
      result_.err = error.what();
    }
  }

  bool is_running() const { return pid_ > 0; }
  std::array<int, 2> descriptors() const { return {out_.descriptor(), err_.descriptor()}; }
  Deadline deadline() const { return deadline_; }

  void poll(bool quit) {
    if (!is_running()) return;
    read_available();
    int status = 0;
    const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
    if (ended == 0 && !quit && !deadline_.expired()) return;
    ::kill(-pid_, SIGKILL);  // the tool and the processes that it has left behind
    ::kill(pid_, SIGKILL);   // the tool, if it has not created its session yet
    if (ended == 0) {
      while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {  // bounded: the tool was killed
      }
      result_.code = ToolResult::kTimedOut;
    } else {
      result_.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    read_available();
    pid_ = -1;
    out_.close();
    err_.close();
  }

 private:
  void read_available() {
    out_.read_available();
    err_.read_available();
  }

  ToolResult& result_;
  Deadline deadline_;
  pid_t pid_ = -1;
  OutputPipe out_, err_;
};

}  // namespace

std::vector<ToolResult> run_tools(const std::vector<ToolCommand>& calls, int quit) {
  std::vector<ToolResult> results(calls.size());
  std::vector<RunningTool> tools;
  for (std::size_t i = 0; i < calls.size(); ++i) tools.emplace_back(calls[i], results[i]);
  while (std::ranges::any_of(tools, &RunningTool::is_running)) {
    std::vector<pollfd> entries = {{quit, POLLRDHUP, 0}};
    Deadline first = Deadline::in(kPollInterval);
    for (const RunningTool& tool : tools) {
      for (const int descriptor : tool.descriptors()) entries.push_back({descriptor, POLLIN, 0});
      if (tool.is_running()) first = earlier(first, tool.deadline());
    }
    ::poll(entries.data(), entries.size(), first.poll_ms());
    for (RunningTool& tool : tools) tool.poll(entries[0].revents != 0);
  }
  return results;
}

ToolResult run_tool(const ToolCommand& call) { return std::move(run_tools({call}, -1).front()); }

std::string find_tool(const std::string& name, const Environment& environment) {
  try {
    return find_program(name, find_variable(environment, "PATH").value_or(kDefaultSearchPath));
  } catch (const base::UsageError&) {
    return "";
  }
}

}  // namespace lockstep::launcher::process
