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
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/protocol/rank_exit.h"
#include "lockstep/launch/hosts/file_staging.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

class AgentLink {
 public:
  /// `silence`: for how long it may tell nothing; 0: for ever. The process is ours to end.
  AgentLink(std::string host, std::string way, AgentProcess process, std::chrono::milliseconds silence);

  const std::string& host() const { return host_; }
  /// The program between: "ssh", "srun" or, here, none.
  const std::string& way() const { return way_; }
  pid_t pid() const { return process_.pid; }
  /// Readable when it tells something or is gone; -1 when it tells nothing any more.
  int descriptor() const { return process_.from ? process_.from.get() : -1; }

  /// A connection to its host, which ends when that is out of reach; -1: none. Nothing is ever read from it.
  int tether() const { return tether_ ? tether_.get() : -1; }
  void tie(base::Fd tether) { tether_ = std::move(tether); }
  /// When the tether has become readable: it is dropped. True when that was because the host is out of reach, not
  /// because the agent has ended.
  bool tether_is_cut();

  /// The program between does not become an agent before it has these files. To be called before anything is read.
  void ship(std::shared_ptr<const std::vector<Cargo>> cargo) { shipment_.emplace(std::move(cargo)); }
  /// Writable when ship_more() has something to do; -1: nothing is to be shipped now.
  int ships_to() const { return shipment_ && process_.to && !shipment_->wanted().empty() ? process_.to.get() : -1; }
  void ship_more();

  /// Waits 10 s at most for room in the pipe. An agent that is gone is told nothing.
  void send(const Frame& frame);
  /// What it has told. At the end of its output the descriptor is closed, after the last frames. Throws Error
  /// kProtocol.
  std::vector<Frame> read();

  /// It has been told to end its ranks and itself: when it is there at `deadline`, it is killed.
  void must_end(base::Deadline deadline) { ends_by_ = earlier(ends_by_, deadline); }
  /// When look_at_clock() has something to do.
  base::Deadline next_look() const { return earlier(ends_by_, speaks_by_); }
  /// Kills one that does not end. True, once, when it has told nothing for too long, and is killed for that.
  bool look_at_clock();

  /// What ssh has written to stderr so far, without the last newline; at most 4 KiB.
  std::string words() const;

  /// Ends it at once.
  void kill();
  /// Waits for the process, at most 5 s before it gets SIGKILL, and then at most 1 s; how it has ended.
  RankEnd reap();

 private:
  base::Deadline next_word() const;
  void take(std::string_view bytes);

  std::string host_, way_;
  AgentProcess process_;
  base::Fd tether_;
  std::chrono::milliseconds silence_;
  std::optional<Shipment> shipment_;
  std::string said_;  // by the script that takes it
  FrameReader frames_{kMaxFrame};
  base::Deadline ends_by_ = base::Deadline::never();
  base::Deadline speaks_by_ = base::Deadline::never();
  bool is_asked_ = false;  // speaks_by_ is the second, short wait
};

}  // namespace lockstep::launcher
