// PyTorch's c10d as a baseline, used from C++ as PyTorch's Python code uses it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::bench {

/// c10d::ProcessGroupGloo of the ranks of this job, over the loopback interface, with default options. The constructor
/// throws UsageError in a build without Gloo's headers. Waits are bounded by the timeout of the process group.
class GlooBaseline {
 public:
  GlooBaseline();
  ~GlooBaseline();
  void all_reduce(std::vector<at::Tensor>& tensor);
  void barrier();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// c10d::Reducer, set up as PyTorch's DistributedDataParallel sets it up: it broadcasts the parameters, has buckets of
/// 1 and 25 MiB, and rebuilds them after the first step.
class ReducerBaseline {
 public:
  ReducerBaseline(torch::nn::Module& net, bool bucket_views);
  ~ReducerBaseline();
  void before_forward();
  void before_backward(const at::Tensor& output);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::bench
