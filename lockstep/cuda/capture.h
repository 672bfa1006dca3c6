// libtorch's CUDA graphs, as far as GraphedStep needs them: capture.cc, or no_capture.cc with a libtorch that has no
// CUDA.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::cuda {

class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// On the current stream. Waits for nothing.
  virtual void replay() = 0;
};

/// What `body` puts on the current stream, which is not the default one, and on those that follow it, without doing it.
/// What is thrown comes out, and leaves nothing behind.
std::unique_ptr<CapturedGraph> capture(const std::function<void()>& body);

}  // namespace lockstep::cuda
