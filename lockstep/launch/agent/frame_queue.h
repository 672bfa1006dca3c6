// What the agent has to tell the launcher, without ever waiting for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// A queue of frames in front of a non-blocking descriptor. Output of ranks is bounded: when the launcher does not read
/// (a person has stopped it), the oldest is dropped and counted, so that no rank ever waits. Of a rank's pulses the
/// newest is kept. All other frames are kept.
class FrameQueue {
 public:
  explicit FrameQueue(int fd, std::size_t limit = std::size_t{8} << 20) : fd_(fd), limit_(limit) {}

  void push(const Frame& frame);
  /// Writes what can be written now. False when nobody can read it any more.
  bool flush();
  bool empty() const { return queue_.empty(); }

 private:
  struct Entry {
    std::string bytes;
    bool droppable = false;
    int health_of_rank = -1;  // a rank
  };
  bool replace_rank_health(const Frame& frame);
  void drop_oldest();

  int fd_;
  std::size_t limit_;
  std::deque<Entry> queue_;
  std::size_t written_ = 0;  // of the first entry
  std::size_t droppable_bytes_ = 0;
  std::int64_t dropped_bytes_ = 0;  // not yet told
};

}  // namespace lockstep::launcher
