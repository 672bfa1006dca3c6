// Processes for tests: started with arguments and environment, their output captured, every wait bounded, and none left
// behind.
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
  std::vector<std::string> argv;                ///< argv[0] is a path, or looked for in PATH
  std::map<std::string, std::string> env = {};  ///< on top of the test's own environment, from which all variables of
                                                ///< launchers (LOCKSTEP_*, RANK, OMP_NUM_THREADS ...) are taken out
  bool read_out = true;                         ///< false: nobody reads the pipe that is its stdout
  int out = -1;                                 ///< its stdout instead of a pipe; borrowed
  int err = -1;                                 ///< its stderr instead of a pipe; borrowed
};

/// How a process ended.
struct ProcessResult {
  int code = 0;    ///< as a shell says it: 128 + signal for a death by signal
  int signal = 0;  ///< 0: it exited
  std::string out;
  std::string err;
  std::chrono::milliseconds elapsed{0};  ///< since its start
};

/// A child in a process group of its own, with default signal handling. All that it starts inherits a mark in the
/// environment, by which what is left can be found wherever it has gone. Not for several threads.
class Process {
 public:
  explicit Process(const SpawnOptions& options);
  /// Kills whatever is left. Processes that outlive their wait() by 2 s fail the test, and so does a missing wait().
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;

  /// Reads until `text` has come on stdout or stderr; false at the deadline or when both have ended.
  bool wait_for(std::string_view text, base::Deadline deadline);
  /// Waits for its end and reads all output. At the deadline the test fails and the process is killed.
  ProcessResult wait(base::Deadline deadline);

  const std::string& out() const { return texts_[0]; }
  const std::string& err() const { return texts_[1]; }

  /// All processes that carry the mark now, zombies not.
  std::vector<pid_t> live_processes() const;
  /// Waits until exactly `count` processes carry the mark; false at the deadline.
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

/// Starts and waits; 30 s unless another limit is given.
ProcessResult run_process(const SpawnOptions& options, std::chrono::seconds limit = std::chrono::seconds(30));

/// Children of `pid` now.
std::vector<pid_t> children_of(pid_t pid);
/// argv of `pid`, joined with blanks; "" when it is gone.
std::string command_of(pid_t pid);

/// A few milliseconds between two looks at something that gives no sign.
void short_pause();

/// Looks again and again until `condition` is true; false at the deadline.
template <typename Condition>
bool eventually(base::Deadline deadline, Condition condition) {
  while (!condition()) {
    if (deadline.expired()) return false;
    short_pause();
  }
  return true;
}

}  // namespace lockstep::tests
