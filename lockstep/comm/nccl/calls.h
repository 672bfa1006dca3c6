// Translates a collective into calls of NCCL.
#pragma once

#include <string>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm::nccl {

/// Describes the call for error messages, for example "ncclBroadcast(float32[1000], root 0)".
std::string describe_call(const Collective& op);

/// Enqueues `op` on `stream`, as rank `rank` of `size`. Returns the first result that is an error, otherwise
/// ncclSuccess or ncclInProgress.
ncclResult_t enqueue(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size);

}  // namespace lockstep::comm::nccl
