// Tensors on GPUs beside those on the CPU: by NCCL, or through the host's memory over the transport that the ranks have
// anyway.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/transport.h"

namespace lockstep::comm {

struct DeviceTransportOptions {
  std::shared_ptr<Transport> host;  ///< of tensors on the CPU
  /// Makes NCCL's for some of the ranks, given by their numbers here, when they first need it; `part` names it. Null:
  /// there is no NCCL.
  std::function<std::shared_ptr<Transport>(const std::string& part, const std::vector<int>& ranks)> make_nccl;
  std::shared_ptr<Transport> nccl;  ///< that of all ranks, when it has been made already
  int rank = 0;
  int size = 1;
  bool spans_hosts = false;  ///< the ranks are on
};

/// `host`, for which nothing changes, and tensors on the GPU of this rank. By NCCL an operation is done on the host
/// when it is on its way, and Pending::on_device() announces its end. Between two ranks there is a communicator for
/// each direction, so that both may send before they receive. Through the host's memory the input is copied to pinned
/// memory in the order of the current stream, and the result back in that of whoever waits; operations stay in the
/// order in which they were started. So goes, where there is NCCL too, what is to cross between hosts as another dtype
/// (Collective::wire).
std::shared_ptr<Transport> make_device_transport(DeviceTransportOptions options);

/// NCCL's part of a transport that make_device_transport() has made, for all of its ranks; null when there is none, or
/// it was not needed yet.
std::shared_ptr<Transport> nccl_transport_of(Transport& transport);

}  // namespace lockstep::comm
