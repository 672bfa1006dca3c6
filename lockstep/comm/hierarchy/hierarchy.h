// The transport of ranks on several hosts: shared memory inside a host, another transport between hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/local_peers.h"

namespace lockstep::comm {

/// What a transport between hosts is for.
enum class Scope {
  kLarge,     ///< slices of large tensors, among the ranks with one local place
  kSmall,     ///< messages of a few KB, among the first ranks of the hosts
  kAllRanks,  ///< what is not done host by host, among all ranks
};

struct HierarchyOptions {
  std::shared_ptr<const LocalPeers> neighbours;
  std::shared_ptr<job::Store> store;  // for this transport alone
  std::vector<int> members;           // world ranks
  std::vector<int> hosts;  // of each member: any number that is the same for members of one host; at least two differ
  int rank = 0;            // here
  std::chrono::milliseconds timeout{};  // for the others to come
  /// Connects `members`, world ranks of which this is one; all of them call it with the same name.
  std::function<std::shared_ptr<Transport>(Scope scope, const std::string& name, const std::vector<int>& members)>
      make_cross_host;
};

/// all_reduce, reduce, reduce_scatter and broadcast go host by host: every byte crosses once for each host, whatever
/// the order of the ranks, and hosts may have different numbers of them. Rank r of a host carries slice r, in pieces,
/// while the others' travel too; up to 4 KiB the first rank carries all, in one message each way, and so it does for
/// all_gather and barrier. Larger all_gathers, gather, scatter, all_to_all, send and recv go over the outer transport
/// among all ranks, and cross as often as that one sends them.
///
/// Sums add the ranks of a host in their order, then the hosts in theirs: the same bits everywhere and every time.
/// float16 and bfloat16 are rounded once a host and once at the end; so is float32 when Collective::wire says so, from
/// 4 KiB on.
///
/// Small operations advance while somebody waits, and overtake large ones. Those go on two tracks in turn, each with
/// connections and a thread of its own (made by its first), so that gradients travel during backward(). Waits for the
/// other members. Throws CommError.
std::shared_ptr<Transport> make_hierarchy_transport(const HierarchyOptions& options);

}  // namespace lockstep::comm
