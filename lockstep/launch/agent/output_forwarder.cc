#include "lockstep/launch/agent/output_forwarder.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "lockstep/launch/agent/epoll.h"

namespace lockstep::launcher::agent {
namespace {

constexpr std::size_t kMaxChunkBytes = std::size_t{1} << 16;

/// Returns the number of bytes that a pipe contains.
std::size_t waiting_bytes(int fd) {
  int waiting = 0;
  return fd >= 0 && ::ioctl(fd, FIONREAD, &waiting) == 0 ? static_cast<std::size_t>(waiting) : 0;
}

}  // namespace

void OutputForwarder::add_rank(int rank, std::array<base::Fd, 2> pipes) {
  ranks_.push_back({.rank = rank, .pipes = {}});
  for (std::size_t stream = 0; stream < 2; ++stream) {
    base::set_nonblocking(pipes[stream].get());
    ranks_.back().pipes[stream].fd = std::move(pipes[stream]);
    watch(ranks_.size() - 1, stream);
  }
}

void OutputForwarder::watch(std::size_t index, std::size_t stream) {
  Pipe& pipe = ranks_[index].pipes[stream];
  add_to_epoll(epoll_, pipe.fd.get(), 4 * index + stream, EPOLLIN);
  pipe.is_paused = false;
}

void OutputForwarder::read(std::size_t index, std::size_t stream, std::size_t max_bytes) {
  Pipe& pipe = ranks_[index].pipes[stream];
  char bytes[kMaxChunkBytes];
  while (pipe.fd && max_bytes > 0) {
    const ssize_t size = ::read(pipe.fd.get(), bytes, std::min(max_bytes, sizeof bytes));
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) return pipe.fd.reset();  // closing removes it from the epoll set
    max_bytes -= static_cast<std::size_t>(size);
    pipe.in_flight += static_cast<std::size_t>(size);
    queue_.push({stream == 0 ? protocol::FrameKind::kStdout : protocol::FrameKind::kStderr, ranks_[index].rank,
                 std::string(bytes, static_cast<std::size_t>(size))});
  }
}

void OutputForwarder::forward(std::size_t index, std::size_t stream) {
  Pipe& pipe = ranks_[index].pipes[stream];
  read(index, stream, std::min(window_ - std::min(window_, pipe.in_flight), kMaxChunkBytes));
  if (!pipe.fd || pipe.in_flight < window_) return;
  // The end of a pipe is reported even if no event is asked for, so it cannot stay in the set.
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, pipe.fd.get(), nullptr);
  pipe.is_paused = true;
}

void OutputForwarder::acknowledge(int rank, std::size_t stream, std::size_t bytes) {
  for (std::size_t index = 0; index < ranks_.size(); ++index) {
    if (ranks_[index].rank != rank || stream > 1) continue;
    Pipe& pipe = ranks_[index].pipes[stream];
    pipe.in_flight -= std::min(pipe.in_flight, bytes);
    if (pipe.fd && pipe.is_paused && pipe.in_flight < window_) watch(index, stream);
  }
}

void OutputForwarder::forward_written(std::size_t index) {
  for (std::size_t stream = 0; stream < 2; ++stream)
    read(index, stream, waiting_bytes(ranks_[index].pipes[stream].fd.get()));
}

void OutputForwarder::forward_rest() {
  for (std::size_t index = 0; index < ranks_.size(); ++index) forward_written(index);
}

bool OutputForwarder::is_blocked(std::size_t index) const {
  return std::any_of(ranks_[index].pipes.begin(), ranks_[index].pipes.end(), [](const Pipe& pipe) {
    if (!pipe.fd || !pipe.is_paused) return false;
    // Writes that do not fit into the rest of a page begin a new page, so a full pipe may be half empty.
    const int capacity = ::fcntl(pipe.fd.get(), F_GETPIPE_SZ);
    return waiting_bytes(pipe.fd.get()) + PIPE_BUF >= static_cast<std::size_t>(std::max(capacity, 0)) / 2;
  });
}

}  // namespace lockstep::launcher::agent
