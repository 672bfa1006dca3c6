// PyTorch's own machinery, driven from C++ as its Python drives it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::bench {

/// c10d::ProcessGroupGloo among the ranks of this job, over the loopback interface, with its defaults. Throws
/// UsageError when this build is without gloo's headers.
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

/// c10d::Reducer as DistributedDataParallel sets it up: parameters broadcast, buckets of 1 and 25 MiB, rebuilt after
/// the first step.
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
