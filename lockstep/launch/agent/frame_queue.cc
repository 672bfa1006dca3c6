#include "lockstep/launch/agent/frame_queue.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace lockstep::launcher::agent {

void FrameQueue::push(const protocol::Frame& frame) {
  using Kind = protocol::FrameKind;
  const bool is_rank_health = frame.kind == Kind::kRankHealth;
  if (frame.kind == Kind::kStdout || frame.kind == Kind::kStderr || frame.kind == Kind::kRankExited ||
      frame.kind == Kind::kDone)
    ordered_.push_back(protocol::encode(frame));
  else if (!is_rank_health || !replace_rank_health(frame))
    reports_.push_back({protocol::encode(frame), is_rank_health ? frame.rank : -1});
}

bool FrameQueue::replace_rank_health(const protocol::Frame& frame) {
  for (Entry& entry : reports_) {
    if (entry.health_of_rank != frame.rank) continue;
    entry.bytes = protocol::encode(frame);
    return true;
  }
  return false;
}

bool FrameQueue::flush() {
  while (!empty()) {
    if (current_.empty() && !reports_.empty()) {
      current_ = std::move(reports_.front().bytes);
      reports_.pop_front();
    } else if (current_.empty()) {
      current_ = std::move(ordered_.front());
      ordered_.pop_front();
    }
    const ssize_t size = ::write(fd_, current_.data() + written_, current_.size() - written_);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return errno == EAGAIN;
    written_ += static_cast<std::size_t>(size);
    if (written_ < current_.size()) continue;
    current_.clear();
    written_ = 0;
  }
  return true;
}

}  // namespace lockstep::launcher::agent
