// What NCCL's few words mean.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "lockstep/comm/cuda/cuda.h"

namespace lockstep::comm {

/// Where a failure happened.
struct NcclLocation {
  int rank = 0;  ///< in the world
  Gpu gpu;
  std::string host;
  std::string address;       ///< of the host on the network to the others; may be empty
  std::string interface;     ///< NCCL_SOCKET_IFNAME; may be empty
  std::string visible_gpus;  ///< CUDA_VISIBLE_DEVICES; may be empty
};

struct NcclFailure {
  int result = 0;          ///< ncclResult_t
  std::string op;          ///< "broadcast(parameters)#1"
  std::string call;        ///< "ncclBroadcast(float32[1000], root 0)": the call and its parameters
  std::string last_error;  ///< ncclGetLastError()
  int cuda_error = 0;      ///< of the runtime, when it has one
};

/// The number in "Cuda failure 2 'out of memory'", as NCCL writes it; 0 when there is none. Pure.
int parse_cuda_error(std::string_view last_error);

/// The error to throw. A CommError where this rank is at fault: kResource for what CUDA refused, kConfigMismatch for a
/// use that NCCL refuses, kInternal for the rest. A base::Error kPeerUnreachable for what the network or another rank's
/// end brings about: DeadlockDetector::throw_transport_failure() finds out which.
std::exception_ptr to_exception(const NcclFailure& failure, const NcclLocation& location);

}  // namespace lockstep::comm
