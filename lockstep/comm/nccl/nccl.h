// NCCL itself as a transport, for tensors on GPUs. Compiled with the header that comes with libtorch's NCCL, and
// carried out by the library that libtorch has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/cuda/cuda.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

struct NcclOptions {
  std::shared_ptr<job::Store> store;  ///< for this transport alone: where the ranks learn its name
  std::vector<int> members;           ///< world ranks
  int rank = 0;                       ///< here
  Gpu gpu;                            ///< of this rank, which no other member has
  std::string host;                   ///< its name, for errors
  std::string address;                ///< of this host on the network to the others, likewise
  std::shared_ptr<Transport>
      parent;     ///< one of these that is connected, of all members and perhaps others: then nobody need meet anew
  int color = 0;  ///< with parent: ranks of it that say the same are the members
};

/// Empty when it can be used, else why not. load_cuda() must have been called.
std::string nccl_unavailable_reason();
/// "2.28.9", of the library that is loaded.
std::string nccl_version();

/// Communicators are non-blocking ones, on a stream of their own. Nothing here waits: ranks connect while they wait for
/// their first operation, an operation's Pending is done when NCCL has taken it, and its device_completion() when the
/// GPU has done it. A failure ends everything, with ncclCommAbort, and becomes an error that names the rank, its GPU,
/// NCCL's call with its parameters, and what CUDA and NCCL say; one that may come from the loss of a peer is left to
/// whoever can find out. With `parent` all its ranks call this, or skip_nccl_split(), in the same order. The destructor
/// waits up to 10 s for the others to let go, too, unless something or the job has failed.
std::shared_ptr<Transport> make_nccl_transport(NcclOptions options);

/// For a rank of `parent` that is in none of the groups into which the others divide themselves.
void skip_nccl_split(Transport& parent);

}  // namespace lockstep::comm
