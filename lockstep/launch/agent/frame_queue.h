// A queue of frames from the agent to the launcher that does not block the agent.
#pragma once

#include <cstddef>
#include <deque>
#include <string>

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

}  // namespace lockstep::launcher::agent
