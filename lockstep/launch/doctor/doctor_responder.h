// The agent's side of `lockstep doctor`: replies to the launcher's requests before a job arrives.
#pragma once

#include <functional>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// handle() sends the reply before it returns. It blocks for at most 70 s while it collects host facts and 10 s for a
/// measurement; a measurement for another host ends early if `input`, the descriptor of the launcher, becomes readable.
/// Single-threaded. Throws whatever `send` throws, and Error kProtocol for an invalid frame.
class DoctorResponder {
 public:
  DoctorResponder(std::function<void(FrameKind, const std::string&)> send, int input)
      : send_(std::move(send)), input_(input) {}

  /// Returns false if the frame is not a request of the doctor.
  bool handle(const Frame& frame);

 private:
  void send_clock() const;
  void listen(const std::string& payload) const;
  void measure(const std::string& payload) const;

  std::function<void(FrameKind, const std::string&)> send_;
  int input_;
};

}  // namespace lockstep::launcher
