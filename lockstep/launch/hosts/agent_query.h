// Sends requests to agents that have no ranks yet, and collects the replies.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::base::net {
class ConnectivityProbe;
}  // namespace lockstep::base::net

namespace lockstep::launcher::hosts {

class AgentLink;

/// Sends a request to several agents and waits for the replies. Not thread-safe.
class AgentQuery {
 public:
  using MakePayload = std::function<std::string(std::size_t agent)>;
  using OnReply = std::function<void(std::size_t agent, const std::string& payload)>;
  /// The callback for an agent that does not reply. `why` continues a sentence that begins with the agent's host. If
  /// the callback throws, ask() throws that exception.
  using OnLost = std::function<void(std::size_t agent, const std::string& why)>;

  /// While ask() waits, it handles the connections of `connectivity`, and it calls check_interrupted(signals), which
  /// may throw. `signals` is a descriptor of make_signal_fd(). `agents` and `connectivity` must outlive this object.
  AgentQuery(std::vector<AgentLink>& agents, base::net::ConnectivityProbe& connectivity, int signals, OnLost on_lost)
      : agents_(agents), connectivity_(connectivity), signals_(signals), on_lost_(std::move(on_lost)) {}

  /// Sends a frame of kind `request` to each agent in `agents` and returns when each has replied with a frame of kind
  /// `reply` or is lost. Blocks for at most `limit`. If `take` throws an Error, its agent counts as lost.
  void ask(const std::vector<std::size_t>& agents, protocol::FrameKind request, const MakePayload& payload,
           protocol::FrameKind reply, std::chrono::seconds limit, const OnReply& take);

 private:
  bool read_reply(std::size_t agent, protocol::FrameKind reply, const OnReply& take);

  std::vector<AgentLink>& agents_;
  base::net::ConnectivityProbe& connectivity_;
  int signals_;
  OnLost on_lost_;
};

}  // namespace lockstep::launcher::hosts
