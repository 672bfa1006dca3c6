#include "lockstep/launch/tools.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/process.h"
#include "lockstep/launch/program.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kLookAgain = 50ms;  // what a tool leaves behind may hold its pipe open, so its end is looked for as well

/// One that runs.
class Tool {
 public:
  Tool(const ToolCall& call, ToolSaid& said) : said_(said), deadline_(Deadline::in(call.limit)) {
    said_.path = call.path;
    if (call.path.empty()) return;
    base::Pipe pipe = base::make_pipe();
    base::set_nonblocking(pipe.read.get());
    try {
      pid_ = spawn_tool(call.path, call.words, call.environment, call.directory, pipe.write.get());
    } catch (const base::SystemError& error) {
      said_.text = error.what();
      return;
    }
    out_ = std::move(pipe.read);
  }

  bool runs() const { return pid_ > 0; }
  int descriptor() const { return out_ ? out_.get() : -1; }
  Deadline deadline() const { return deadline_; }

  void look(bool quit) {
    if (!runs()) return;
    hear();
    int status = 0;
    const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
    if (ended == 0 && !quit && !deadline_.expired()) return;
    ::kill(-pid_, SIGKILL);  // and what it has left
    ::kill(pid_, SIGKILL);   // before it has its session
    if (ended == 0) {
      // bounded: it was killed
      while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
      }
      said_.code = ToolSaid::kNoEnd;
    } else {
      said_.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    hear();
    pid_ = -1;
    out_.reset();
  }

 private:
  void hear() {
    char bytes[1 << 12];
    while (out_) {
      const ssize_t size = ::read(out_.get(), bytes, sizeof bytes);
      if (size < 0 && errno == EINTR) continue;
      if (size == 0) out_.reset();
      if (size <= 0) return;
      said_.text.append(bytes, std::min(static_cast<std::size_t>(size), kMostText - said_.text.size()));
    }
  }

  ToolSaid& said_;
  Deadline deadline_;
  pid_t pid_ = -1;
  base::Fd out_;
};

}  // namespace

std::vector<ToolSaid> run_tools(const std::vector<ToolCall>& calls, int quit) {
  std::vector<ToolSaid> said(calls.size());
  std::vector<Tool> tools;
  for (std::size_t i = 0; i < calls.size(); ++i) tools.emplace_back(calls[i], said[i]);
  while (std::any_of(tools.begin(), tools.end(), [](const Tool& tool) { return tool.runs(); })) {
    std::vector<pollfd> entries = {{quit, POLLRDHUP, 0}};
    Deadline first = Deadline::in(kLookAgain);
    for (const Tool& tool : tools) {
      entries.push_back({tool.descriptor(), POLLIN, 0});
      if (tool.runs()) first = earlier(first, tool.deadline());
    }
    ::poll(entries.data(), entries.size(), first.poll_ms());
    for (Tool& tool : tools) tool.look(entries[0].revents != 0);
  }
  return said;
}

std::string tool_path(const std::string& name, const Environment& environment) {
  std::string search_path = "/usr/local/bin:/usr/bin:/bin";
  for (const std::string& variable : environment)
    if (variable.rfind("PATH=", 0) == 0) search_path = variable.substr(5);
  try {
    return find_program(name, search_path);
  } catch (const base::UsageError&) {
    return "";
  }
}

}  // namespace lockstep::launcher
