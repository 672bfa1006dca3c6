// A queue of frames from the agent to the launcher that never blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// A queue of frames in front of a non-blocking descriptor. Output of ranks is bounded: if the launcher does not read
/// (a user has suspended it), the oldest output is dropped and counted, so that no rank ever blocks. Only the newest
/// health report of each rank is kept. All other frames are kept. Used by one thread.
class FrameQueue {
 public:
  explicit FrameQueue(int fd, std::size_t limit = std::size_t{8} << 20) : fd_(fd), limit_(limit) {}

  void push(const Frame& frame);
  /// Writes as much as possible without blocking. Returns false if the reader has closed the descriptor.
  bool flush();
  bool empty() const { return queue_.empty(); }

 private:
  struct Entry {
    std::string bytes;
    bool droppable = false;
    int health_of_rank = -1;  // the rank of a health report; -1: another frame
  };
  bool replace_rank_health(const Frame& frame);
  void drop_oldest();

  int fd_;
  std::size_t limit_;
  std::deque<Entry> queue_;
  std::size_t written_ = 0;  // bytes of the first entry that are written
  std::size_t droppable_bytes_ = 0;
  std::int64_t dropped_bytes_ = 0;  // dropped, but not reported yet
};

}  // namespace lockstep::launcher
