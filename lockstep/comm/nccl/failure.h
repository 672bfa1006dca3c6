// Translates errors of NCCL into exceptions that name the GPU, the call and a remedy.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "lockstep/comm/gpu/cuda.h"

namespace lockstep::comm::nccl {

/// The rank, GPU and host of a failure.
struct NcclLocation {
  int rank = 0;  ///< world rank
  gpu::Gpu gpu;
  std::string host;
  std::string address;       ///< address of the host for the other ranks; may be empty
  std::string interface;     ///< NCCL_SOCKET_IFNAME; may be empty
  std::string visible_gpus;  ///< CUDA_VISIBLE_DEVICES; may be empty
};

struct NcclFailure {
  int result = 0;          ///< ncclResult_t
  std::string op;          ///< the operation, for example "broadcast(parameters)#1"
  std::string call;        ///< the call and its parameters, for example "ncclBroadcast(float32[1000], root 0)"
  std::string last_error;  ///< the text of ncclGetLastError()
  int cuda_error = 0;      ///< the last error of the CUDA runtime; 0: none
};

/// Returns the number in a text like "Cuda failure 2 'out of memory'", which NCCL writes, or 0 if there is none. Pure.
int parse_cuda_error(std::string_view last_error);

/// Returns the exception for a failure. It is a CommError if this rank is at fault: kResource for an error of CUDA,
/// kConfigMismatch for invalid usage of NCCL, kInternal otherwise. It is a base::Error with kPeerUnreachable if the
/// network or the end of another rank is the cause; DeadlockDetector::throw_transport_failure() determines which.
std::exception_ptr to_exception(const NcclFailure& failure, const NcclLocation& location);

}  // namespace lockstep::comm::nccl
