#include "lockstep/launch/supervise/stdin_forwarder.h"

#include <unistd.h>

#include <cerrno>

namespace lockstep::launcher::supervise {

StdinForwarder::StdinForwarder(cli::StdinRanks ranks, std::size_t num_agents) {
  if (ranks == cli::StdinRanks::kRankZero) agents_.insert(0);
  for (std::size_t i = 0; i < num_agents && ranks == cli::StdinRanks::kAll; ++i) agents_.insert(i);
}

int StdinForwarder::poll_fd() const {
  if (!is_started_ || has_ended_ || agents_.empty() || !awaited_.empty()) return -1;
  const bool in_background = ::isatty(STDIN_FILENO) == 1 && ::tcgetpgrp(STDIN_FILENO) != ::getpgrp();
  return in_background ? -1 : STDIN_FILENO;
}

void StdinForwarder::forward(const std::function<void(std::size_t, const std::string&)>& send) {
  std::string bytes(std::size_t{1} << 16, '\0');
  const ssize_t size = ::read(STDIN_FILENO, bytes.data(), bytes.size());
  if (size < 0 && (errno == EINTR || errno == EAGAIN)) return;
  bytes.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  has_ended_ = bytes.empty();
  for (const std::size_t agent : agents_) send(agent, bytes);
  awaited_ = agents_;
}

}  // namespace lockstep::launcher::supervise
