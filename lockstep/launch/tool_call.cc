#include "lockstep/launch/tool_call.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

/// A file without a name.
base::Fd scratch_file(std::string_view content) {
  base::Fd fd(::memfd_create("tool", MFD_CLOEXEC));
  if (!fd) throw base::SystemError("cannot make a file without a name", errno);
  for (std::size_t done = 0; done < content.size();) {
    const ssize_t size = ::pwrite(fd.get(), content.data() + done, content.size() - done, static_cast<off_t>(done));
    if (size <= 0) throw base::SystemError("cannot write to a file without a name", errno);
    done += static_cast<std::size_t>(size);
  }
  return fd;
}

std::string content_of_file(const base::Fd& fd) {
  std::string text;
  char block[4096];
  for (ssize_t size = 0; (size = ::pread(fd.get(), block, sizeof block, static_cast<off_t>(text.size()))) > 0;) text.append(block, static_cast<std::size_t>(size));
  return text;
}

/// Stdin, stdout and stderr are these descriptors; no signal is blocked.
pid_t spawn(const std::string& path, const std::vector<std::string>& words, const int (&streams)[3]) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  for (int i = 0; i < 3; ++i) ::posix_spawn_file_actions_adddup2(&actions, streams[i], i);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, path.c_str(), &actions, &attributes, pointers.data(), ::environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw base::SystemError("cannot execute " + path, error);
  return pid;
}

/// Its status; it is killed at the deadline.
int wait_for(pid_t pid, const std::string& path, base::Deadline deadline) {
  int status = 0;
  for (std::chrono::milliseconds pause = 1ms; ::waitpid(pid, &status, WNOHANG) == 0; pause = std::min(pause * 2, 50ms)) {
    if (deadline.expired()) {
      ::kill(-pid, SIGKILL);
      ::waitpid(pid, &status, 0);  // bounded: SIGKILL ends it
      throw base::SystemError(path + " has not ended in time, and was killed", ETIMEDOUT);
    }
    ::poll(nullptr, 0, deadline.poll_ms(pause));
  }
  return status;
}

}  // namespace

ToolAnswer call_tool(const std::string& path, const std::vector<std::string>& words, std::string_view input, base::Deadline deadline) {
  const base::Fd in = scratch_file(input), out = scratch_file(""), err = scratch_file("");
  const pid_t pid = spawn(path, words, {in.get(), out.get(), err.get()});
  const int status = wait_for(pid, path, deadline);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), content_of_file(out), content_of_file(err)};
}

}  // namespace lockstep::launcher
