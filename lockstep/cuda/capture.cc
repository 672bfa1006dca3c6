// Captures work as a CUDA graph with libtorch.
#include "lockstep/cuda/capture.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>

#include <memory>

namespace lockstep::cuda {
namespace {

class CudaGraph final : private at::cuda::CUDAGraph {
 public:
  /// The mode ThreadLocal does not restrict other threads, such as those that pin memory for a loader.
  void begin() { capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal); }
  void end() { capture_end(); }
  using CUDAGraph::replay;

  /// Cleans up after an error between begin() and end(). For a capture that CUDA has invalidated, capture_end() throws
  /// before it has notified the allocators.
  void abort_capture() noexcept {
    try {
      capture_end();
    } catch (const c10::Error&) {
      if (capture_ended_) return;
      try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
        at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
        c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_);
        at::getHostAllocator(at::kCUDA)->release_pool(mempool_id_);
      } catch (const c10::Error&) {  // the allocator had been notified
      }
    }
  }
};

}  // namespace

std::function<void()> capture(const std::function<void()>& body) {
  const auto graph = std::make_shared<CudaGraph>();
  try {
    graph->begin();
    body();
    graph->end();
  } catch (...) {
    graph->abort_capture();
    throw;
  }
  return [graph] { graph->replay(); };
}

}  // namespace lockstep::cuda
