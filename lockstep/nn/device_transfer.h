// Tensors on their way between devices, counted, forward and back. Private to nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::nn {

/// Bytes that have gone between devices. Any thread.
class TransferCounter {
 public:
  struct Bytes {
    std::int64_t received = 0;
    std::int64_t sent = 0;
  };
  void count(at::Device from, at::Device to, std::int64_t bytes);
  Bytes of(at::Device device) const;

 private:
  mutable std::mutex mutex_;  // guards bytes_
  std::map<std::string, Bytes> bytes_;
};

/// `tensor` on `device`; itself where it is there already. Its gradient comes back the same way.
at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device,
                          const std::shared_ptr<TransferCounter>& transfers);

/// `parameter` on each of `devices`; where it is there already, the same memory. Its gradient is the sum of theirs in
/// their order, whenever they were computed; undefined ones are left out.
std::vector<at::Tensor> replicate(const at::Tensor& parameter, const std::vector<at::Device>& devices,
                                  const std::shared_ptr<TransferCounter>& transfers);

}  // namespace lockstep::nn
