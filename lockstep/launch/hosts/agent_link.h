// The launcher's end of the connection to one agent, local or started through ssh or srun.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/hosts/file_staging.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher {

/// Owns the process of one agent (for a remote host the ssh or srun client) and its pipes. Used by one thread.
class AgentLink {
 public:
  /// Takes ownership of `process`, which must be running. `max_silence`: how long the agent may send nothing; 0:
  /// without limit. `via`: "ssh", "srun" or empty.
  AgentLink(std::string host, std::string via, AgentProcess process, std::chrono::milliseconds max_silence);

  const std::string& host() const { return host_; }
  /// The program between launcher and agent: "ssh" or "srun"; empty for an agent on this host.
  const std::string& via() const { return via_; }
  pid_t pid() const { return process_.pid; }
  /// Becomes readable when the agent has sent something or has ended; -1 after the end of its output.
  int descriptor() const { return process_.from ? process_.from.get() : -1; }

  /// A connection to the agent's host, which ends when the host becomes unreachable; -1: none. No data is read from it.
  int liveness_fd() const { return liveness_fd_ ? liveness_fd_.get() : -1; }
  void set_liveness_fd(base::Fd liveness_fd) { liveness_fd_ = std::move(liveness_fd); }
  /// Closes the liveness connection. Call it when liveness_fd() is readable. Returns true if the connection ended
  /// because the host is unreachable, false if the agent ended.
  bool close_liveness_fd();

  /// Copies `files` to the host before its shell executes the agent. Must be called before the first read().
  void stage_files(std::shared_ptr<const std::vector<StagedFile>> files) { staging_.emplace(std::move(files)); }
  /// To be polled for writing: valid while continue_staging() has bytes to send, else -1.
  int staging_fd() const {
    return staging_ && process_.to && !staging_->pending_bytes().empty() ? process_.to.get() : -1;
  }
  /// Writes the next bytes of the files without blocking.
  void continue_staging();

  /// Sends a frame. Blocks while the pipe is full; if it stays full for 10 s, closes it. Does nothing if the agent has
  /// ended.
  void send(const Frame& frame);
  /// Returns the frames that have arrived; does not block. At the end of the agent's output it returns the last frames
  /// and closes the descriptor. Throws Error kProtocol.
  std::vector<Frame> read();

  /// Kills the agent if it is still running at `deadline`. The caller has asked it to end its ranks and to exit.
  void kill_after(base::Deadline deadline) { exit_due_ = earlier(exit_due_, deadline); }
  /// When check_timeouts() has to be called.
  base::Deadline next_deadline() const { return earlier(exit_due_, message_due_); }
  /// Kills an agent whose deadline has passed. Returns true, once, if the agent was silent for too long and was killed
  /// for that.
  bool check_timeouts();

  /// What ssh or srun has written to stderr so far, without trailing newlines; at most 4 KiB.
  std::string stderr_text() const;

  /// Kills the process; does not wait for it.
  void kill();
  /// Waits for the process: at most 5 s before SIGKILL, and then at most 1 s. Returns how it ended.
  RankExit reap();

 private:
  base::Deadline next_message_due() const;
  void feed(std::string_view bytes);

  std::string host_, via_;
  AgentProcess process_;
  base::Fd liveness_fd_;
  std::chrono::milliseconds max_silence_;
  std::optional<FileStaging> staging_;
  std::string script_output_;  // output of the staging script that is not parsed
  FrameReader frames_{kMaxFrameBytes};
  base::Deadline exit_due_ = base::Deadline::never();
  base::Deadline message_due_ = base::Deadline::never();
  bool is_second_silence_ = false;  // message_due_ ends the second, short wait
};

}  // namespace lockstep::launcher
