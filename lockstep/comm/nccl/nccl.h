// The NCCL transport, for tensors on GPUs. Compiled with the header of libtorch's NCCL; calls the library that libtorch
// has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/gpu/cuda.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::nccl {

struct NcclOptions {
  std::shared_ptr<job::Store> store = nullptr;  ///< used by this transport alone, to exchange NCCL's unique id
  std::vector<int> members = {};                ///< world ranks
  int rank = 0;                                 ///< index of this rank in `members`
  gpu::Gpu gpu = {};                            ///< the GPU of this rank
  std::string host = {};                        ///< name of this host, for error messages
  std::string address = {};                     ///< address of this host for the other ranks, for error messages
  /// A connected NCCL transport that contains all members. If set, the communicator is split from it without a
  /// rendezvous.
  std::shared_ptr<Transport> parent = nullptr;
  int color = 0;  ///< with `parent`: the members are the ranks of `parent` that pass the same color
};

/// Returns an empty string if NCCL is available, otherwise the reason. load_cuda() must have been called.
std::string nccl_unavailable_reason();
/// Returns an empty string if ranks on one GPU may use the loaded NCCL, otherwise the reason: it must be 2.30 or newer,
/// and NCCL_MULTI_RANK_GPU_ENABLE must be 1, which `lockstep run --share-gpus` sets.
std::string cannot_share_gpu_reason();
/// Returns the version of the loaded library, for example "2.28.9".
std::string nccl_version();

/// Makes a transport whose communicator is nonblocking and has a stream of its own. No function blocks: the ranks
/// connect while they wait for their first operation. The Pending of an operation is done when NCCL has enqueued it,
/// and its device_completion() when the GPU has completed it. A failure ends all operations with ncclCommAbort() and
/// becomes an error that names the rank, its GPU, the NCCL call with its parameters, and the messages of CUDA and NCCL.
/// If the loss of a peer may have caused the failure, the caller must determine the cause (see to_exception()). With
/// `parent`, all its ranks must call this function or skip_nccl_split(), in the same order. The destructor waits up to
/// 10 s for splits and 10 s for the other ranks to finalize, unless an operation or the job has failed.
std::shared_ptr<Transport> make_nccl_transport(NcclOptions options);

/// Takes part in the split of `parent` for a rank that is in none of the new groups.
void skip_nccl_split(Transport& parent);

}  // namespace lockstep::comm::nccl
