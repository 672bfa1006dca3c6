// The processes of the ranks of this host: their arguments, environment, standard input and error files, signals to
// them, and what they leave behind.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/launch/agent/rank_monitor.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/process/event_loop.h"

namespace lockstep::launcher::agent {

/// Writes each chunk of input to every rank that reads it, without blocking. Not thread-safe.
class StdinWriter {
 public:
  /// `loop` calls `on_writable`, which calls flush(), when a rank can take more. It keeps pointers to this object,
  /// which must not be moved.
  StdinWriter(process::EventLoop& loop, process::EventLoop::Handler on_writable)
      : loop_(loop), on_writable_(std::move(on_writable)) {}

  /// Takes the write end of a rank's stdin. Throws SystemError.
  void add_rank(base::Fd pipe);

  /// Begins to write `bytes`; empty means the end of the input. The last chunk must have been taken.
  void write(std::string bytes);
  /// Continues. Returns true once when all ranks have taken the chunk, or do not read any more.
  bool flush();

 private:
  struct RankStdin {
    base::Fd pipe;
    std::size_t written = 0;  // bytes of the chunk
  };

  process::EventLoop& loop_;
  const process::EventLoop::Handler on_writable_;
  std::vector<RankStdin> ranks_;
  std::string chunk_;
  bool is_pending_ = false;
};

/// Returns the arguments of the job, and those of the rank.
std::vector<std::string> rank_argv(const plan::JobPlan& job, const plan::RankPlan& plan);

/// Returns the variables of the job, and those of the rank; `page` is the descriptor of its page, and `error_file` the
/// file for its error.
process::Environment rank_environment(const plan::JobPlan& job, const plan::RankPlan& plan, int page,
                                      const std::string& error_file);

/// Replaces the program, or the Python script, of the job by the copies that the launcher has sent, if it has.
void use_staged_files(plan::JobPlan& job, const cli::AgentOptions& staged);

/// Adds the folder of the Python hook to PYTHONPATH, so that a program with torch.distributed is watched. No effect if
/// the interpreter has the hook: the package is installed there; if the hook is neither `staged_hook` nor
/// installed with this program; or if LOCKSTEP_WATCH is "off". Any program may start an interpreter, so what the
/// program is does not matter.
/// Returns a warning if the folder cannot be in PYTHONPATH, which separates folders by ':'; otherwise "".
std::string add_python_hook(plan::JobPlan& job, const std::string& staged_hook);

struct RankProcess {
  int rank = -1;
  pid_t pid = -1;  ///< -1: not started, or reaped
  RankMonitor monitor;
  pid_t session = -1;       ///< its session and process group: the pid, also after its end
  int deferred_signal = 0;  ///< what it has started gets this signal when it has ended; 0: none
  bool succeeded = false;   ///< it has exited in good order
};

/// Sends SIGUSR1 or SIGUSR2 to the ranks that expect it. See process::signal_first_expecting().
void forward_signal(const std::vector<RankProcess>& ranks, int signal);

/// Sends a signal that asks to stop to the running ranks, without those in their world unless `also_in_world`. If the
/// program of a rank handles it (see process::signal_programs()), what the program has started gets it only when the
/// rank has ended, because the program may need its workers and other helpers to save. Otherwise the whole process
/// group gets it.
void signal_ranks(std::vector<RankProcess>& ranks, int signal, bool also_in_world);

/// Returns the running children of this process that ranks which have succeeded left behind, as "4711 (curl), 4712
/// (tee)", the first eight of each rank. Call it when all ranks have ended: this process has inherited their children.
/// A child that has called setsid() is assigned by the variable LOCKSTEP_RANK in its environment; without it, to no
/// rank.
std::map<int, std::string> find_left_behind(const std::vector<RankProcess>& ranks);

/// One file per rank, which a program writes if its main function has the decorator `record` of
/// torch.distributed.elastic, or because it follows that contract: TORCHELASTIC_ERROR_FILE names the file. The names
/// are random. A file exists only from the failure of a rank until take_message().
class ErrorFiles {
 public:
  /// Throws SystemError.
  ErrorFiles();

  /// Returns the path of the file of `rank`, below the directory for temporary files.
  std::string path(int rank) const { return prefix_ + std::to_string(rank) + ".json"; }

  /// Reads and removes the file of `rank`. Returns its message, at most protocol::kMaxErrorMessageBytes of it; empty if
  /// there is no file or if it is not such a file. The file is untrusted.
  std::string take_message(int rank) const;

 private:
  std::string prefix_;
};

/// Returns the message in `text`, the contents of an error file: {"message": {"message": "ValueError: x", ...}} or
/// {"message": "ValueError: x"}. Empty if it is neither. Pure.
std::string error_file_message(const std::string& text);

}  // namespace lockstep::launcher::agent
