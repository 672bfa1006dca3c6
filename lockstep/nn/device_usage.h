// Statistics of the devices of a DataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

}  // namespace lockstep::nn
