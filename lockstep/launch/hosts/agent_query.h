// Questions to agents that have no ranks yet, and their answers.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

class AgentLink;
class ConnectivityProbe;

class AgentQuery {
 public:
  using MakePayload = std::function<std::string(std::size_t agent)>;
  using OnReply = std::function<void(std::size_t agent, const std::string& payload)>;
  /// Told of an agent that gives no answer, and why: words that follow its name. When it throws, the question ends.
  using OnLost = std::function<void(std::size_t agent, const std::string& why)>;

  /// While it waits it serves `crossing`, and heeds a person (Error kInterrupted, `signals` as for gather()). All of
  /// these must outlive it.
  AgentQuery(std::vector<AgentLink>& agents, ConnectivityProbe& connectivity, int signals, OnLost lose)
      : agents_(agents), connectivity_(connectivity), signals_(signals), on_lost_(std::move(lose)) {}

  /// Sends `question` to agents `whom` and returns when each has answered by a frame of kind `answer`, or is lost. What
  /// `take` throws as Error loses its agent, too.
  void ask(const std::vector<std::size_t>& whom, FrameKind question, const MakePayload& payload, FrameKind answer,
           std::chrono::seconds limit, const OnReply& take);

 private:
  bool read_reply(std::size_t agent, FrameKind answer, const OnReply& take);

  std::vector<AgentLink>& agents_;
  ConnectivityProbe& connectivity_;
  int signals_;
  OnLost on_lost_;
};

}  // namespace lockstep::launcher
