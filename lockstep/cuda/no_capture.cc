// capture() for a libtorch without CUDA.
#include "lockstep/base/error.h"
#include "lockstep/cuda/capture.h"

namespace lockstep::cuda {

std::function<void()> capture(const std::function<void()>&) {
  throw base::UsageError("GraphedStep: the libtorch of this build has no CUDA",
                         "install a torch wheel with CUDA and build again");
}

}  // namespace lockstep::cuda
