// Forwards the output of the ranks of a host to the launcher, through a queue of frames that does not block the agent.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::agent {

/// A queue of frames in front of a non-blocking descriptor. The output of the ranks, their exits and kDone keep their
/// order; every other frame overtakes them, so that no report waits behind output. Of the health reports of a rank it
/// keeps only the newest. It drops nothing else: OutputForwarder limits the output in it. Not thread-safe.
class FrameQueue {
 public:
  explicit FrameQueue(int fd) : fd_(fd) {}

  void push(const protocol::Frame& frame);
  /// Writes as much as possible without blocking. Returns false if the reader has closed the descriptor.
  bool flush();
  bool empty() const { return current_.empty() && reports_.empty() && ordered_.empty(); }

 private:
  struct Entry {
    std::string bytes;
    int health_of_rank = -1;  // the rank if this is a health report, else -1
  };
  bool replace_rank_health(const protocol::Frame& frame);

  int fd_;
  std::deque<Entry> reports_;        // frames that overtake
  std::deque<std::string> ordered_;  // output, exits and kDone
  std::string current_;              // the frame that is being written; empty: none
  std::size_t written_ = 0;          // number of its bytes that are written
};

/// Reads the pipes of ranks and queues what they contain as kStdout and kStderr frames. Of each pipe, at most `window`
/// bytes are on their way to their destination. It then stops reading the pipe, and a rank that writes more blocks, as
/// with any full pipe, until the launcher acknowledges some. The index of a rank is the number of earlier calls of
/// add_rank(). Not thread-safe.
class OutputForwarder {
 public:
  /// `loop` reads the pipes: it keeps pointers to this object, which must not be moved. Both must outlive it.
  OutputForwarder(process::EventLoop& loop, FrameQueue& queue) : loop_(loop), queue_(queue) {}

  void set_window(std::size_t window) { window_ = window; }

  /// Takes the read ends of the stdout and stderr of `rank`. Throws SystemError.
  void add_rank(int rank, std::array<base::Fd, 2> pipes);

  /// The launcher has acknowledged bytes of a stream (0 is stdout, 1 is stderr). Ignores ranks that it does not have.
  void acknowledge(int rank, std::size_t stream, std::size_t bytes);

  /// Forwards what the rank, which has exited, has written so far, and not what processes that it left behind write.
  void forward_written(std::size_t index);
  /// Forwards the rest of all pipes. Call it when no process is left that could write.
  void forward_rest() {
    for (std::size_t index = 0; index < ranks_.size(); ++index) forward_written(index);
  }

  /// Returns whether the rank cannot write to stdout or stderr because its output is not read: the agent has stopped
  /// reading the pipe, and it is full.
  bool is_blocked(std::size_t index) const;

 private:
  struct Pipe {
    base::Fd fd;
    std::size_t in_flight = 0;  // bytes that are not acknowledged
  };
  struct RankPipes {
    int rank = -1;
    std::array<Pipe, 2> pipes;
  };
  void read(std::size_t index, std::size_t stream, std::size_t max_bytes);
  bool is_paused(const Pipe& pipe) const { return pipe.in_flight >= window_; }

  process::EventLoop& loop_;
  FrameQueue& queue_;
  std::size_t window_ = 0;
  std::vector<RankPipes> ranks_;
};

}  // namespace lockstep::launcher::agent
