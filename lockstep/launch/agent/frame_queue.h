// A queue of frames from the agent to the launcher that does not block the agent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::agent {

/// A queue of frames in front of a non-blocking descriptor. If the launcher does not read, because a user has suspended
/// it, the queue grows up to `limit` bytes of the ranks' output and then drops and counts the oldest output, so that no
/// rank blocks. Of the health reports of a rank it keeps only the newest. It keeps all other frames. Not thread-safe.
class FrameQueue {
 public:
  explicit FrameQueue(int fd, std::size_t limit = std::size_t{8} << 20) : fd_(fd), limit_(limit) {}

  void push(const protocol::Frame& frame);
  /// Writes as much as possible without blocking. Returns false if the reader has closed the descriptor.
  bool flush();
  bool empty() const { return queue_.empty(); }

 private:
  struct Entry {
    std::string bytes;
    bool droppable = false;
    int health_of_rank = -1;  // the rank if this is a health report, else -1
  };
  bool replace_rank_health(const protocol::Frame& frame);
  void drop_oldest();

  int fd_;
  std::size_t limit_;
  std::deque<Entry> queue_;
  std::size_t written_ = 0;  // number of bytes of the first entry that are written
  std::size_t droppable_bytes_ = 0;
  std::int64_t dropped_bytes_ = 0;  // dropped, but not reported yet
};

}  // namespace lockstep::launcher::agent
