// The part of libtorch's CUDA graphs that GraphedStep needs. Implemented in capture.cc, or in no_capture.cc if libtorch
// has no CUDA.
#pragma once

#include <functional>

namespace lockstep::cuda {

/// Captures the work that `body` submits to the current stream, which must not be the default stream, and to streams
/// that depend on it, as a graph. Capturing does not run the work. The returned function starts the graph on the
/// current stream and does not block; its copies share the graph. Exceptions of `body` propagate after the capture has
/// been cleaned up.
std::function<void()> capture(const std::function<void()>& body);

}  // namespace lockstep::cuda
