// The agent's part in `lockstep doctor`: it answers what the launcher asks before any job has come.
#pragma once

#include <functional>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// Every answer is said before the call returns. An examination takes 70 s at most, a measurement 10 s; one that serves
/// another host ends early when `input`, the launcher's end, has something to read. Single-threaded. Throws what `say`
/// throws, and Error kProtocol for a broken frame.
class DoctorResponder {
 public:
  DoctorResponder(std::function<void(FrameKind, const std::string&)> send, int input)
      : send_(std::move(send)), input_(input) {}

  /// False when the frame is none of the doctor's.
  bool handle(const Frame& frame);

 private:
  void send_clock() const;
  void listen(const std::string& payload) const;
  void measure(const std::string& payload) const;

  std::function<void(FrameKind, const std::string&)> send_;
  int input_;
};

}  // namespace lockstep::launcher
