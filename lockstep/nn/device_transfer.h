// Copies of tensors between devices, counted in both directions of the graph, and how devices are used. Private to nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::nn {

struct DeviceUsage {
  at::Device device;
  int replicas = 0;
  std::int64_t samples = 0;         ///< in all forward() calls
  std::int64_t held_bytes = 0;      ///< parameters and buffers of its replicas; shared memory counts once
  std::int64_t received_bytes = 0;  ///< from other devices: parameters, inputs, outputs, gradients
  std::int64_t sent_bytes = 0;
  std::optional<std::int64_t> peak_bytes;  ///< peak bytes of this process's tensors there; empty on the CPU
};

/// Formats a table with a header row and one row per device:
///   device  replicas  samples         held     received         sent         peak
///   cuda:0         1       16      4.0 MiB      1.0 MiB      8.0 MiB     92.4 MiB
std::string format_device_usage(const std::vector<DeviceUsage>& device_usage);

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
