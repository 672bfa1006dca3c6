#include "lockstep/launch/agent/stdin_writer.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lockstep/launch/agent/epoll.h"

namespace lockstep::launcher::agent {

void StdinWriter::add_rank(base::Fd pipe, std::uint64_t epoll_data) {
  base::set_nonblocking(pipe.get());
  add_to_epoll(epoll_, pipe.get(), epoll_data, EPOLLOUT | EPOLLET);
  ranks_.push_back({std::move(pipe)});
}

void StdinWriter::write(std::string bytes) {
  chunk_ = std::move(bytes);
  is_pending_ = true;
  for (RankStdin& rank : ranks_) {
    rank.written = 0;
    if (chunk_.empty()) rank.pipe.reset();
  }
}

bool StdinWriter::flush() {
  bool is_taken = true;
  for (RankStdin& rank : ranks_) {
    while (rank.pipe && rank.written < chunk_.size()) {
      const ssize_t size = ::write(rank.pipe.get(), chunk_.data() + rank.written, chunk_.size() - rank.written);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno == EAGAIN) break;
      if (size < 0)
        rank.pipe.reset();  // the rank has closed its stdin
      else
        rank.written += static_cast<std::size_t>(size);
    }
    is_taken = is_taken && (!rank.pipe || rank.written == chunk_.size());
  }
  return is_taken && std::exchange(is_pending_, false);
}

}  // namespace lockstep::launcher::agent
