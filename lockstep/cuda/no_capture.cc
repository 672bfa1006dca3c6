#include "lockstep/base/error.h"
#include "lockstep/cuda/capture.h"

namespace lockstep::cuda {

std::unique_ptr<CapturedGraph> capture(const std::function<void()>&) {
  throw base::UsageError("this build's libtorch has no CUDA (the wheel torch for CUDA brings it)");
}

}  // namespace lockstep::cuda
