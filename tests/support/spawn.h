// Starts processes for tests, with given arguments and environment, and captures their output. Every wait is bounded,
// and processes that outlive a test make it fail.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::tests {

struct SpawnOptions {
  std::vector<std::string> argv;  ///< argv[0] is a path, or looked up in PATH
  /// Added to the test's own environment without the variables of launchers (LOCKSTEP_*, RANK, OMP_NUM_THREADS ...).
  std::map<std::string, std::string> env = {};
  bool read_out = true;  ///< whether the pipe that is its stdout is read
  int out = -1;          ///< a descriptor for its stdout instead of a pipe; borrowed
  int err = -1;          ///< a descriptor for its stderr instead of a pipe; borrowed
};

/// How a process ended, and its output.
struct ProcessResult {
  int code = 0;    ///< as in a shell: 128 + signal if a signal killed the process
  int signal = 0;  ///< 0 if the process exited
  std::string out;
  std::string err;
  std::chrono::milliseconds elapsed{0};  ///< since its start
};

/// A child process in a process group of its own, with default signal handling. All its descendants inherit a mark in
/// their environment, by which processes that are left can be found. Not thread-safe.
class Process {
 public:
  explicit Process(const SpawnOptions& options);
  /// Kills all remaining processes. The test fails if a process outlives wait() by 2 s, or if wait() was not called.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;

  /// Reads until `text` appears on stdout or stderr. Returns false at the deadline, or if both have ended.
  bool wait_for(std::string_view text, base::Deadline deadline);
  /// Blocks until the process ends, and reads all its output. At the deadline the test fails and the process is killed.
  ProcessResult wait(base::Deadline deadline);

  const std::string& out() const { return texts_[0]; }
  const std::string& err() const { return texts_[1]; }

  /// Returns all processes that have the mark now, except zombies.
  std::vector<pid_t> live_processes() const;
  /// Blocks until exactly `count` processes have the mark. Returns false at the deadline.
  bool wait_for_live_count(std::size_t count, base::Deadline deadline) const;

 private:
  void read_some(base::Deadline deadline);
  std::optional<int> reap();

  std::string mark_;
  pid_t pid_ = -1;
  bool waited_ = false;
  bool read_out_;
  base::Deadline::Clock::time_point start_;
  base::Fd pipes_[2];
  std::string texts_[2];
};

/// Starts a process and waits for its end.
ProcessResult run_process(const SpawnOptions& options, std::chrono::seconds limit = std::chrono::seconds(30));

/// Returns the present children of `pid`.
std::vector<pid_t> children_of(pid_t pid);
/// Returns argv of `pid`, joined with spaces; "" if the process has ended.
std::string command_of(pid_t pid);

/// Sleeps for a few milliseconds, between two polls of a condition.
void short_pause();

/// Polls until `condition` is true. Returns false at the deadline.
template <typename Condition>
bool eventually(base::Deadline deadline, Condition condition) {
  while (!condition()) {
    if (deadline.expired()) return false;
    short_pause();
  }
  return true;
}

}  // namespace lockstep::tests
