// The CUDA functions that comm needs. A program does not link CUDA: libtorch_cuda is loaded when a rank gets a GPU, and
// the CUDA runtime is the one that libtorch uses. Implemented by cuda.cc, or by no_cuda.cc for a libtorch without CUDA.
#pragma once

#include <string>

namespace lockstep::comm::gpu {

/// The GPUs that the driver reports to this process; CUDA_VISIBLE_DEVICES restricts them.
struct VisibleGpus {
  int count = 0;
  std::string missing;         ///< the reason why there are none; empty if there are some
  bool driver_broken = false;  ///< the host has a driver that cannot be used; `missing` has the reason
};
VisibleGpus visible_gpus();

/// Loads libtorch_cuda, unless it is loaded. Throws UsageError if it cannot be loaded, or if libtorch has checked for
/// CUDA before: it checks once, in the first call of torch::manual_seed(), torch::cuda::is_available() or a similar
/// function.
void load_cuda();

/// A GPU that is visible to this process.
struct Gpu {
  int index = 0;     ///< among the visible GPUs
  std::string name;  ///< for example "NVIDIA H100 80GB HBM3"
  std::string uuid;  ///< "GPU-...", unique and the same in every process
};
/// Throws base::Error (kResource) if CUDA cannot read the properties of the GPU.
Gpu describe_gpu(int index);

/// Makes GPU `index` the current device of this thread; the device "cuda" refers to it. Allocates no memory on the GPU.
void set_current_gpu(int index);

/// Returns the name of an error, for example "cudaErrorMemoryAllocation" for 2, or an empty string if CUDA has no error
/// with this number.
std::string cuda_error_name(int error);
/// Returns the last CUDA error of this thread without clearing it; 0: none.
int peek_cuda_error();

}  // namespace lockstep::comm::gpu
