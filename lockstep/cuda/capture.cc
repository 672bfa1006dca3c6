#include "lockstep/cuda/capture.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>

namespace lockstep::cuda {
namespace {

class CudaGraph final : public CapturedGraph, private at::cuda::CUDAGraph {
 public:
  void begin() {
    capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  }  // other threads go on, such as those that pin memory for a loader
  void end() { capture_end(); }
  void replay() override { CUDAGraph::replay(); }

  /// After an error in between. capture_end() throws for a capture that CUDA has given up, before it tells the
  /// allocators.
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
      } catch (const c10::Error&) {  // it had been told
      }
    }
  }
};

}  // namespace

std::unique_ptr<CapturedGraph> capture(const std::function<void()>& body) {
  auto graph = std::make_unique<CudaGraph>();
  try {
    graph->begin();
    body();
    graph->end();
  } catch (...) {
    graph->abort_capture();
    throw;
  }
  return graph;
}

}  // namespace lockstep::cuda
