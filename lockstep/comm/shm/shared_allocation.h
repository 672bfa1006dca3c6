// A block of memory that all ranks of a channel map.
#pragma once

#include <cstddef>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

/// The first of `size` ranks makes it and hands it to the others through a private door; `store` is for this call
/// alone. Nothing names it, so it goes with the last mapping. A child made by fork() must not touch it. Throws
/// CommError on every rank, kResource when the host has less memory than that.
SharedAllocation make_shared_allocation(job::Store& store, int rank, int size, std::size_t bytes,
                                        base::Deadline deadline);

}  // namespace lockstep::comm
