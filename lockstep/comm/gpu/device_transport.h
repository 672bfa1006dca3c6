// A transport for tensors on the CPU and on GPUs: GPU tensors use NCCL, or are copied through pinned host memory.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm::gpu {

struct DeviceTransportOptions {
  std::shared_ptr<Transport> host = nullptr;  ///< the transport for tensors on the CPU
  /// Creates an NCCL transport with the name `part` for `ranks`, which are indices in this transport. Called when an
  /// operation first needs it. Null if NCCL is not used.
  std::function<std::shared_ptr<Transport>(const std::string& part, const std::vector<int>& ranks)> make_nccl = nullptr;
  std::shared_ptr<Transport> nccl = nullptr;  ///< the NCCL transport of all ranks, if it exists already
  int rank = 0;
  int size = 1;
  bool spans_hosts = false;  ///< true if the ranks are on several hosts
};

/// Passes operations on CPU tensors to `host` unchanged, and also supports tensors on the GPU of this rank. With NCCL,
/// the Pending of an operation is done when NCCL has enqueued it, and Pending::device_completion() represents its
/// completion on the GPU. Each pair of ranks has one communicator per direction, so that both may send before they
/// receive. Without NCCL, the input is copied to pinned memory on the current stream, and the result is copied back on
/// the current stream of the thread that waits; operations keep the order in which they were started. Operations that
/// send another dtype between hosts (Collective::wire_dtype) also work in this way.
std::shared_ptr<Transport> make_device_transport(DeviceTransportOptions options);

/// Returns the NCCL transport among all ranks of a transport from make_device_transport(). Returns null if NCCL is not
/// used or no operation has needed it, and for other transports.
std::shared_ptr<Transport> nccl_transport_of(Transport& transport);

}  // namespace lockstep::comm::gpu
