// The agent's side of `lockstep doctor`: replies to the launcher's requests.
#pragma once

#include <functional>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::doctor {

/// Executes one request at a time. handle() sends the reply with `send` before it returns. It blocks for at most 70 s
/// to collect host facts and at most 10 s for a measurement. While it waits for another host to connect, it returns
/// early if `input`, the descriptor of the launcher, becomes readable. Throws what `send` throws, and Error kProtocol
/// for an invalid frame or one that is not a request of the doctor. Not thread-safe.
class DoctorResponder {
 public:
  DoctorResponder(std::function<void(protocol::FrameKind, const std::string&)> send, int input)
      : send_(std::move(send)), input_(input) {}

  void handle(const protocol::Frame& frame) const;

 private:
  void listen(const std::string& payload) const;
  void measure(const std::string& payload) const;

  std::function<void(protocol::FrameKind, const std::string&)> send_;
  int input_;
};

}  // namespace lockstep::launcher::doctor
