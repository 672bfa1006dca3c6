// The other ranks of this host, and their memory as this process sees it.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

class LocalPeers {
 public:
  /// Every rank of `ranks` (of the world, ascending, this one included) calls it; each gives the others its arena, over
  /// sockets in folders that only this user can enter. Throws CommError when one does not come or cannot be reached.
  static std::shared_ptr<LocalPeers> connect(job::Store& store, const std::vector<int>& ranks, int rank,
                                             base::Deadline deadline);

  const std::vector<int>& ranks() const { return ranks_; }
  int rank() const { return rank_; }
  /// Where the arena of `rank` begins in this process's addresses; this rank's own is Arena::process().
  char* arena_of(int rank) const;
  /// Each of `members` gives a block of its own arena, of `bytes`; returned in their order, as this process sees them.
  /// `store` is for this call alone. Throws CommError when one does not come.
  std::vector<void*> exchange_addresses(job::Store& store, const std::vector<int>& members, const void* own,
                                        std::size_t bytes, base::Deadline deadline) const;
  /// False once the process of `rank` has ended. A system call.
  bool is_alive(int rank) const;
  /// More ranks than cores that they may run on: then a wait must not spin.
  bool is_oversubscribed() const { return oversubscribed_; }

 private:
  struct LocalPeer {
    base::Fd socket;  // the other end closes with the process, and with children that it forked without exec
    base::SharedMemory arena;
  };
  LocalPeers(std::vector<int> ranks, int rank);
  void exchange_arena(int peer, base::Fd socket, base::Deadline deadline);

  const std::vector<int> ranks_;
  const int rank_;
  bool oversubscribed_ = false;
  std::map<int, LocalPeer> peers_;
};

}  // namespace lockstep::comm
