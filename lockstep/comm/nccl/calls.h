// An operation as calls of NCCL.
#pragma once

#include <string>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/nccl/library.h"

namespace lockstep::comm {

/// "ncclBroadcast(float32[1000], root 0)", for errors.
std::string describe_call(const Collective& op);

/// Puts `op` on `stream`, for rank `rank` of `size`. The first result that is not good.
ncclResult_t enqueue(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size);

}  // namespace lockstep::comm
