// A block of shared memory that all ranks of a channel map.
#pragma once

#include <cstddef>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::shm {

/// Rank 0 of the `size` ranks creates the memory and passes its descriptor to the others over a private socket. `store`
/// is used by this call alone. The memory has no name in the file system, so the kernel frees it with the last mapping.
/// All its pages exist when the call returns, so touching them cannot fail.
/// A child made by fork() does not inherit it, except what the owner registers (arena::ForkCopied). Blocks until rank 0
/// has served this rank. Throws CommError on every rank, with kResource if the host has less memory available or the
/// kernel refuses it.
SharedAllocation make_shared_allocation(job::Store& store, int rank, int size, std::size_t bytes,
                                        base::Deadline deadline);

}  // namespace lockstep::comm::shm
