#include "lockstep/launch/agent/frame_queue.h"

#include <unistd.h>

#include <cerrno>

namespace lockstep::launcher::agent {

void FrameQueue::push(const protocol::Frame& frame) {
  const bool droppable = frame.kind == protocol::FrameKind::kStdout || frame.kind == protocol::FrameKind::kStderr;
  const bool is_rank_health = frame.kind == protocol::FrameKind::kRankHealth;
  if (is_rank_health && replace_rank_health(frame)) return;
  queue_.push_back({protocol::encode(frame), droppable, is_rank_health ? frame.rank : -1});
  if (!droppable) return;
  droppable_bytes_ += queue_.back().bytes.size();
  if (droppable_bytes_ > limit_) drop_oldest();
}

bool FrameQueue::replace_rank_health(const protocol::Frame& frame) {
  // The first entry may be half written, so it is not replaced.
  for (std::size_t i = written_ > 0 ? 1 : 0; i < queue_.size(); ++i) {
    if (queue_[i].health_of_rank != frame.rank) continue;
    queue_[i].bytes = protocol::encode(frame);
    return true;
  }
  return false;
}

void FrameQueue::drop_oldest() {
  // The first entry may be half written, so it stays.
  for (std::size_t i = written_ > 0 ? 1 : 0; i < queue_.size() && droppable_bytes_ > limit_;) {
    if (!queue_[i].droppable) {
      ++i;
      continue;
    }
    droppable_bytes_ -= queue_[i].bytes.size();
    dropped_bytes_ += static_cast<std::int64_t>(queue_[i].bytes.size());
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool FrameQueue::flush() {
  while (!queue_.empty()) {
    Entry& entry = queue_.front();
    const ssize_t size = ::write(fd_, entry.bytes.data() + written_, entry.bytes.size() - written_);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return errno == EAGAIN;
    written_ += static_cast<std::size_t>(size);
    if (written_ < entry.bytes.size()) continue;
    if (entry.droppable) droppable_bytes_ -= entry.bytes.size();
    queue_.pop_front();
    written_ = 0;
    if (dropped_bytes_ > 0) {
      queue_.push_front({.bytes = protocol::encode(
                             {protocol::FrameKind::kOutputDropped, -1, protocol::encode_numbers({dropped_bytes_})})});
      dropped_bytes_ = 0;
    }
  }
  return true;
}

}  // namespace lockstep::launcher::agent
