// The store that torchrun keeps for its ranks, as ours.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/socket.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

/// Connects to the c10d TCPStore at `address`. Throws CommError kCoordinatorLost when nobody answers before the deadline.
std::shared_ptr<job::Store> connect_torchrun_store(const base::Address& address, base::Deadline deadline);

}  // namespace lockstep::comm
