// The agent's part in `lockstep doctor`: it answers what the launcher asks before any job has come.
#pragma once

#include <functional>
#include <string>

#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {

/// Every answer is said before the call returns. An examination takes 70 s at most, a measurement 10 s; one that serves
/// another host ends early when `input`, the launcher's end, has something to read. Single-threaded. Throws what `say`
/// throws, and Error kProtocol for a broken frame.
class Patient {
 public:
  Patient(std::function<void(FrameKind, const std::string&)> say, int input) : say_(std::move(say)), input_(input) {}

  /// False when the frame is none of the doctor's.
  bool take(const Frame& frame);

 private:
  void tell_time() const;
  void listen(const std::string& payload) const;
  void measure(const std::string& payload) const;

  std::function<void(FrameKind, const std::string&)> say_;
  int input_;
};

}  // namespace lockstep::launcher
