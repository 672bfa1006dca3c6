// The transport of ranks that share a host: they read and write each other's memory.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/local_peers.h"

namespace lockstep::comm {

struct ShmOptions {
  std::shared_ptr<const LocalPeers> neighbours;
  std::shared_ptr<job::Store> store;    // for this transport alone
  std::vector<int> members;             // world ranks, all of them neighbours
  int rank = 0;                         // here
  std::chrono::milliseconds timeout{};  // for the others to come
};

/// Tensors that lie in the arena move without a copy; others through a copy in it. It has no threads: operations
/// advance while somebody waits for one, or starts one. A sum adds in the order of the ranks, so its bits do not depend
/// on who did what when. Waits for the other members. Throws CommError.
std::shared_ptr<Transport> make_shm_transport(const ShmOptions& options);

}  // namespace lockstep::comm
