// Copies of tensors between devices, counted in both directions of the graph. Private to nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::nn {

/// Counts the bytes copied between devices. Thread-safe.
class TransferCounter {
 public:
  struct Bytes {
    std::int64_t received = 0;
    std::int64_t sent = 0;
  };
  void count(at::Device from, at::Device to, std::int64_t bytes);
  Bytes bytes_of(at::Device device) const;

 private:
  mutable std::mutex mutex_;  // guards bytes_
  std::map<std::string, Bytes> bytes_;
};

/// Returns `tensor` on `device`, or `tensor` itself if it is already there. backward() copies its gradient back.
at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device,
                          const std::shared_ptr<TransferCounter>& transfers);

/// Returns `parameter` on each of `devices`; on its own device the result uses the same memory. Its gradient is the sum
/// of the results' gradients in the order of `devices`, regardless of the order in which they are computed; undefined
/// gradients are skipped.
std::vector<at::Tensor> replicate(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                  const std::shared_ptr<TransferCounter>& transfers);

}  // namespace lockstep::nn
