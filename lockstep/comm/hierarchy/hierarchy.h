// The hierarchical transport for ranks on several hosts: shared memory within a host, another transport between hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/local_peers.h"

namespace lockstep::comm::hierarchy {

/// The ranks that a cross-host transport connects, and its purpose.
enum class Scope {
  kSmall,  ///< small messages between the first ranks of the hosts; may make progress only while a rank waits
  kAny,    ///< slices of large tensors, between the ranks with the same local rank; and what all ranks exchange
};

struct HierarchyOptions {
  std::shared_ptr<const shm::LocalPeers> local_peers = nullptr;
  std::shared_ptr<job::Store> store = nullptr;  // used by this transport alone
  std::vector<int> members = {};                // world ranks
  std::vector<int> hosts = {};                  // identifies the host of each member by a number; at least two hosts
  int rank = 0;                                 // index of this rank in `members`
  std::chrono::milliseconds timeout{};          // for connecting the members
  /// Connects `members`, which are world ranks and include this one. All of them call it with the same name.
  std::function<std::shared_ptr<Transport>(Scope scope, const std::string& name, const std::vector<int>& members)>
      make_cross_host = nullptr;
};

/// all_reduce, reduce, reduce_scatter and broadcast are done host by host: each byte is sent once per host, however the
/// ranks are ordered, and hosts may have different numbers of ranks. The rank with local rank r exchanges slice r, in
/// chunks, while the other ranks of its host exchange theirs. A tensor of up to 4 KiB is exchanged as a whole by the
/// first rank of each host, in one message each way; all_gather and barrier work in the same way. Larger all_gathers,
/// gather, scatter, all_to_all, send and recv use a cross-host transport among all ranks, which may send a byte more
/// than once per host.
///
/// Reductions are in the order of the ranks within a host and then in the order of the hosts, so the bits are the same
/// on all ranks and in all runs. float16 and bfloat16 are rounded once per host and once at the end. float32 is rounded
/// in the same way if Collective::wire_dtype is float16, bfloat16 or int8 and the tensor is larger than 4 KiB.
///
/// Small operations make progress while a thread waits for them, and overtake large ones. Large operations use two
/// queues in turn, each with its own connections and its own thread (which the first operation starts), so that
/// gradients are sent during backward(). Blocks until all members have called it. Throws CommError.
std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options);

}  // namespace lockstep::comm::hierarchy
