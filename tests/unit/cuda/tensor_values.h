// The values of a tensor on a GPU, real or fake.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::cuda {

/// Returns the values of a float tensor in the order of its indices. Blocks until the device has computed them.
inline std::vector<float> values(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return {host.const_data_ptr<float>(), host.const_data_ptr<float>() + host.numel()};
}

}  // namespace lockstep::cuda
