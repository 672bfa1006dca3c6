#include "lockstep/launch/agent/output_forwarder.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

namespace lockstep::launcher::agent {
namespace {

constexpr std::size_t kMaxChunkBytes = std::size_t{1} << 16;

/// Returns the number of bytes that a pipe contains.
std::size_t waiting_bytes(int fd) {
  int waiting = 0;
  return fd >= 0 && ::ioctl(fd, FIONREAD, &waiting) == 0 ? static_cast<std::size_t>(waiting) : 0;
}

}  // namespace

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

void OutputForwarder::add_rank(int rank, std::array<base::Fd, 2> pipes) {
  const std::size_t index = ranks_.size();
  ranks_.push_back({.rank = rank, .pipes = {}});
  for (std::size_t stream = 0; stream < 2; ++stream) {
    base::set_nonblocking(pipes[stream].get());
    ranks_.back().pipes[stream].fd = std::move(pipes[stream]);
    loop_.on_readable(
        [this, index, stream] {
          const Pipe& pipe = ranks_[index].pipes[stream];
          return pipe.fd && !is_paused(pipe) ? pipe.fd.get() : -1;
        },
        [this, index, stream] {
          read(index, stream, std::min(window_ - ranks_[index].pipes[stream].in_flight, kMaxChunkBytes));
        });
  }
}

void OutputForwarder::read(std::size_t index, std::size_t stream, std::size_t max_bytes) {
  Pipe& pipe = ranks_[index].pipes[stream];
  char bytes[kMaxChunkBytes];
  while (pipe.fd && max_bytes > 0) {
    const ssize_t size = ::read(pipe.fd.get(), bytes, std::min(max_bytes, sizeof bytes));
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) return pipe.fd.reset();
    max_bytes -= static_cast<std::size_t>(size);
    pipe.in_flight += static_cast<std::size_t>(size);
    queue_.push({stream == 0 ? protocol::FrameKind::kStdout : protocol::FrameKind::kStderr, ranks_[index].rank,
                 std::string(bytes, static_cast<std::size_t>(size))});
  }
}

void OutputForwarder::acknowledge(int rank, std::size_t stream, std::size_t bytes) {
  for (std::size_t index = 0; index < ranks_.size(); ++index) {
    if (ranks_[index].rank != rank || stream > 1) continue;
    Pipe& pipe = ranks_[index].pipes[stream];
    pipe.in_flight -= std::min(pipe.in_flight, bytes);
  }
}

void OutputForwarder::forward_written(std::size_t index) {
  for (std::size_t stream = 0; stream < 2; ++stream)
    read(index, stream, waiting_bytes(ranks_[index].pipes[stream].fd.get()));
}

bool OutputForwarder::is_blocked(std::size_t index) const {
  return std::ranges::any_of(ranks_[index].pipes, [this](const Pipe& pipe) {
    if (!pipe.fd || !is_paused(pipe)) return false;
    // Writes that do not fit into the rest of a page begin a new page, so a full pipe may be half empty.
    const int capacity = ::fcntl(pipe.fd.get(), F_GETPIPE_SZ);
    return waiting_bytes(pipe.fd.get()) + PIPE_BUF >= static_cast<std::size_t>(std::max(capacity, 0)) / 2;
  });
}

}  // namespace lockstep::launcher::agent
