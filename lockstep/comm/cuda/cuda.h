// GPUs, as far as comm needs them. A program links nothing of CUDA: libtorch's library for it is loaded when a rank
// gets a GPU, and the runtime is the one that libtorch uses. cuda.cc, or no_cuda.cc with a libtorch that has none.
#pragma once

#include <string>

namespace lockstep::comm {

/// What this process sees of GPUs: as many as the driver shows, of those that CUDA_VISIBLE_DEVICES names.
struct VisibleGpus {
  int count = 0;
  std::string missing;         ///< why there are none; "" when there are some
  bool driver_broken = false;  ///< there is a driver, which cannot be used: missing says why
};
VisibleGpus visible_gpus();

/// Loads libtorch's library for CUDA, unless it is there. Throws UsageError when it cannot be loaded, or when libtorch
/// has looked for it in vain before: it looks once, at the first torch::manual_seed(), torch::cuda::is_available() or
/// the like.
void load_cuda();

/// A GPU, by its number among those that are visible.
struct Gpu {
  int index = 0;
  std::string name;  ///< "NVIDIA H100 80GB HBM3"
  std::string uuid;  ///< "GPU-...": the same in every process, and no other GPU's
};
Gpu describe_gpu(int index);

/// Tensors on "cuda" of this thread are there from now on. Takes no memory yet.
void set_current_gpu(int index);

/// "cudaErrorMemoryAllocation" of 2; "" for a number that CUDA does not know.
std::string cuda_error_name(int error);
/// The last error of a CUDA call of this thread that nobody has taken; 0: none.
int peek_cuda_error();

}  // namespace lockstep::comm
