// The shared-memory transport: ranks of one host read and write each other's memory.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/local_peers.h"

namespace lockstep::comm::shm {

struct ShmOptions {
  std::shared_ptr<const LocalPeers> local_peers = nullptr;
  std::shared_ptr<job::Store> store = nullptr;  // used by this transport alone
  std::vector<int> members = {};                // world ranks, all of them on this host
  int rank = 0;                                 // index of this rank in `members`
  std::chrono::milliseconds timeout{};          // for connecting the members
};

/// Tensors in the arena are used without a copy; other tensors are copied into it. The transport has no threads:
/// operations make progress while a thread waits for one or starts one. Reductions are in the order of the ranks, so
/// the bits of the result do not depend on timing. Blocks until all members have called it. Throws CommError.
std::shared_ptr<Transport> make_shm_transport(const ShmOptions& options);

}  // namespace lockstep::comm::shm
