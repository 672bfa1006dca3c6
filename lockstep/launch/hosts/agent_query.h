// Questions to agents that have no ranks yet, and their answers.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

class AgentLink;
class Crossing;

class Inquiry {
 public:
  using Payload = std::function<std::string(std::size_t agent)>;
  using Take = std::function<void(std::size_t agent, const std::string& payload)>;
  /// Told of an agent that gives no answer, and why: words that follow its name. When it throws, the question ends.
  using Lose = std::function<void(std::size_t agent, const std::string& why)>;

  /// While it waits it serves `crossing`, and heeds a person (Error kInterrupted, `signals` as for gather()). All of
  /// these must outlive it.
  Inquiry(std::vector<AgentLink>& agents, Crossing& crossing, int signals, Lose lose)
      : agents_(agents), crossing_(crossing), signals_(signals), lose_(std::move(lose)) {}

  /// Sends `question` to agents `whom` and returns when each has answered by a frame of kind `answer`, or is lost. What
  /// `take` throws as Error loses its agent, too.
  void ask(const std::vector<std::size_t>& whom, FrameKind question, const Payload& payload, FrameKind answer,
           std::chrono::seconds limit, const Take& take);

 private:
  bool hear(std::size_t agent, FrameKind answer, const Take& take);

  std::vector<AgentLink>& agents_;
  Crossing& crossing_;
  int signals_;
  Lose lose_;
};

}  // namespace lockstep::launcher
