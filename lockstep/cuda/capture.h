// The part of libtorch's CUDA graphs that GraphedStep needs. Implemented in capture.cc, or in no_capture.cc if libtorch
// has no CUDA.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::cuda {

class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// Starts the graph on the current stream. Does not block.
  virtual void replay() = 0;
};

/// Captures the work that `body` submits to the current stream, which must not be the default stream, and to streams
/// that depend on it. Capturing does not run the work. Exceptions of `body` propagate after the capture has been
/// cleaned up.
std::unique_ptr<CapturedGraph> capture(const std::function<void()>& body);

}  // namespace lockstep::cuda
