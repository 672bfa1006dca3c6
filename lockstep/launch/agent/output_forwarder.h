// Forwards the output of the ranks of a host to the launcher.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/launch/agent/frame_queue.h"
#include "lockstep/launch/process/event_loop.h"

namespace lockstep::launcher::agent {

/// Reads the pipes of ranks and queues what they contain as kStdout and kStderr frames. Of each pipe, at most `window`
/// bytes are on their way to their destination. It then stops reading the pipe, and a rank that writes more blocks, as
/// with any full pipe, until the launcher acknowledges some. The index of a rank is the number of earlier calls of
/// add_rank(). Not thread-safe.
class OutputForwarder {
 public:
  /// `loop` reads the pipes; it calls this object. Both must outlive it.
  OutputForwarder(process::EventLoop& loop, FrameQueue& queue) : loop_(loop), queue_(queue) {}

  void set_window(std::size_t window) { window_ = window; }

  /// Takes the read ends of the stdout and stderr of `rank`. Throws SystemError.
  void add_rank(int rank, std::array<base::Fd, 2> pipes);

  /// The launcher has acknowledged bytes of a stream (0 is stdout, 1 is stderr). Ignores ranks that it does not have.
  void acknowledge(int rank, std::size_t stream, std::size_t bytes);

  /// Forwards what the rank, which has exited, has written so far, and not what processes that it left behind write.
  void forward_written(std::size_t index);
  /// Forwards the rest of all pipes. Call it when no process is left that could write.
  void forward_rest();

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
