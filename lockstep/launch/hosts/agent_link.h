// The launcher's end of the connection to one agent, which runs on this host or was started through ssh or srun.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/hosts/file_staging.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::hosts {

/// The process of an agent, or the ssh or srun that starts one. An agent in another pod (pods.h) has no process here.
struct AgentProcess {
  pid_t pid = -1;
  base::Fd to;    ///< its stdin
  base::Fd from;  ///< its stdout
  base::Fd err;   ///< for ssh and srun: an unnamed file that receives their stderr
};

/// Owns the process of one agent (for a remote host, the ssh or srun client) and its pipes. Not thread-safe. The
/// destructor closes the pipes but does not wait for the process; call reap().
class AgentLink {
 public:
  /// Takes ownership of `process`, which must be running, or be empty. `max_silence` is the longest time in which the
  /// agent may send nothing; 0 means no limit. `via` is "ssh", "srun", "pod" or empty. Throws SystemError.
  AgentLink(std::string host, std::string via, AgentProcess process, std::chrono::milliseconds max_silence);

  const std::string& host() const { return host_; }
  /// Returns what is between launcher and agent: "ssh", "srun" or "pod"; empty for an agent on this host.
  const std::string& via() const { return via_; }
  pid_t pid() const { return process_.pid; }
  /// Returns the descriptor to poll for reading. It becomes readable when the agent has sent data or has ended. Returns
  /// -1 after the end of the agent's output.
  int descriptor() const { return process_.from ? process_.from.get() : -1; }

  /// Returns a connection to the agent's host, on which no data is sent; -1 if there is none. It becomes readable when
  /// it ends, because the agent has ended or the host is unreachable.
  int liveness_fd() const { return liveness_fd_ ? liveness_fd_.get() : -1; }
  void set_liveness_fd(base::Fd liveness_fd) { liveness_fd_ = std::move(liveness_fd); }
  /// Closes the liveness connection. Call it when liveness_fd() is readable. Returns whether the connection ended
  /// because the host is unreachable; if not, the agent has ended.
  bool close_liveness_fd();

  /// Makes read() and continue_staging() copy `files` to the host before its shell executes the agent. Must be called
  /// before the first read().
  void stage_files(std::shared_ptr<const std::vector<StagedFile>> files) { staging_.emplace(std::move(files)); }
  /// Returns the descriptor to poll for writing while continue_staging() has bytes to send, else -1.
  int staging_fd() const {
    return staging_ && process_.to && !staging_->pending_bytes().empty() ? process_.to.get() : -1;
  }
  /// Writes the next bytes of the files without blocking.
  void continue_staging();

  /// Sends a frame. Blocks while the pipe is full. If it stays full for 10 s, closes it; the agent then ends its ranks.
  /// Does nothing if the agent has ended.
  void send(const protocol::Frame& frame);
  /// Returns the frames that have arrived. Does not block. At the end of the agent's output, returns the last frames
  /// and closes the descriptor. Throws Error kProtocol.
  std::vector<protocol::Frame> read();

  /// Makes check_timeouts() kill the agent if it is still running at `deadline`. Call it after requesting that the
  /// agent end its ranks and exit. The earliest deadline applies.
  void kill_after(base::Deadline deadline) { exit_due_ = earlier(exit_due_, deadline); }
  /// Returns the time at which check_timeouts() must be called.
  base::Deadline next_deadline() const { return earlier(exit_due_, message_due_); }
  /// Kills the agent if its deadline has passed or it has been silent for too long. Returns true, once, in the latter
  /// case.
  bool check_timeouts();

  /// Returns the text that ssh or srun has written to stderr so far: at most 4 KiB, without trailing newlines.
  std::string stderr_text() const;

  /// Returns the text at the beginning of what has arrived, at most 200 bytes without control characters: what a shell
  /// printed instead of the agent's frames.
  std::string first_output() const;

  /// Kills the process, closes its pipes, and does not wait for it. descriptor() then returns -1.
  void kill();
  /// Closes the agent's input and waits for the process, if there is one. After 5 s kills it, and then waits for at
  /// most 1 s. Returns how it ended.
  protocol::RankExit reap();

 private:
  void kill_process() const;
  base::Deadline next_message_due() const;
  void feed(std::string_view bytes);

  std::string host_, via_;
  AgentProcess process_;
  base::Fd liveness_fd_;
  std::chrono::milliseconds max_silence_;
  std::optional<FileStaging> staging_;
  std::string first_output_;
  std::string script_output_;  // output of the staging script that is not parsed
  protocol::FrameReader frames_{protocol::kMaxFrameBytes};
  base::Deadline exit_due_ = base::Deadline::never();
  base::Deadline message_due_ = base::Deadline::never();
  bool is_second_silence_ = false;  // message_due_ is the end of kSecondSilence
};

}  // namespace lockstep::launcher::hosts
