// The launcher's end of one agent, whether that was started here or through ssh.
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

class AgentLink {
 public:
  /// `silence`: for how long it may tell nothing; 0: for ever. The process is ours to end.
  AgentLink(std::string host, std::string way, AgentProcess process, std::chrono::milliseconds max_silence);

  const std::string& host() const { return host_; }
  /// The program between: "ssh", "srun" or, here, none.
  const std::string& way() const { return via_; }
  pid_t pid() const { return process_.pid; }
  /// Readable when it tells something or is gone; -1 when it tells nothing any more.
  int descriptor() const { return process_.from ? process_.from.get() : -1; }

  /// A connection to its host, which ends when that is out of reach; -1: none. Nothing is ever read from it.
  int liveness_fd() const { return liveness_fd_ ? liveness_fd_.get() : -1; }
  void set_liveness_fd(base::Fd liveness_fd) { liveness_fd_ = std::move(liveness_fd); }
  /// When the tether has become readable: it is dropped. True when that was because the host is out of reach, not
  /// because the agent has ended.
  bool close_liveness_fd();

  /// The program between does not become an agent before it has these files. To be called before anything is read.
  void ship(std::shared_ptr<const std::vector<StagedFile>> cargo) { staging_.emplace(std::move(cargo)); }
  /// Writable when continue_staging() has something to do; -1: nothing is to be shipped now.
  int staging_fd() const {
    return staging_ && process_.to && !staging_->pending_bytes().empty() ? process_.to.get() : -1;
  }
  void continue_staging();

  /// Waits 10 s at most for room in the pipe. An agent that is gone is told nothing.
  void send(const Frame& frame);
  /// What it has told. At the end of its output the descriptor is closed, after the last frames. Throws Error
  /// kProtocol.
  std::vector<Frame> read();

  /// It has been told to end its ranks and itself: when it is there at `deadline`, it is killed.
  void kill_after(base::Deadline deadline) { exit_due_ = earlier(exit_due_, deadline); }
  /// When check_timeouts() has something to do.
  base::Deadline next_deadline() const { return earlier(exit_due_, message_due_); }
  /// Kills one that does not end. True, once, when it has told nothing for too long, and is killed for that.
  bool check_timeouts();

  /// What ssh has written to stderr so far, without the last newline; at most 4 KiB.
  std::string words() const;

  /// Ends it at once.
  void kill();
  /// Waits for the process, at most 5 s before it gets SIGKILL, and then at most 1 s; how it has ended.
  RankExit reap();

 private:
  base::Deadline next_message_due() const;
  void feed(std::string_view bytes);

  std::string host_, via_;
  AgentProcess process_;
  base::Fd liveness_fd_;
  std::chrono::milliseconds max_silence_;
  std::optional<FileStaging> staging_;
  std::string script_output_;  // by the script that takes it
  FrameReader frames_{kMaxFrameBytes};
  base::Deadline exit_due_ = base::Deadline::never();
  base::Deadline message_due_ = base::Deadline::never();
  bool is_second_silence_ = false;  // message_due_ is the second, short wait
};

}  // namespace lockstep::launcher
