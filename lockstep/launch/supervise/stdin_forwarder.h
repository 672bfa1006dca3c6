// Sends the standard input of this process to the agents whose ranks read it.
#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <string>

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::supervise {

/// Reads the standard input and hands each chunk to every agent that needs it. It reads the next one when all of them
/// have taken the last, so that the slowest rank sets the pace and memory is bounded. Not thread-safe.
class StdinForwarder {
 public:
  /// The first agent has rank 0.
  StdinForwarder(cli::StdinRanks ranks, std::size_t num_agents);

  /// Call it when the ranks have been started.
  void start() { is_started_ = true; }
  /// Returns the descriptor to poll for reading; -1 while no input is needed, or while another process group is in the
  /// foreground of the terminal.
  int poll_fd() const;
  /// Reads what is available and calls `send` with each agent and the bytes, which are empty at the end of the input.
  /// Call it when poll_fd() is readable.
  void forward(const std::function<void(std::size_t, const std::string&)>& send);
  /// The ranks of an agent have taken the last chunk.
  void on_taken(std::size_t agent) { awaited_.erase(agent); }
  void on_agent_lost(std::size_t agent) {
    agents_.erase(agent);
    awaited_.erase(agent);
  }

 private:
  std::set<std::size_t> agents_;   // that have ranks that read the input
  std::set<std::size_t> awaited_;  // agents that have not taken the last chunk
  bool is_started_ = false;
  bool has_ended_ = false;
};

}  // namespace lockstep::launcher::supervise
