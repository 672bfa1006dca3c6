// The other ranks of this host and the mappings of their arenas in this process.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::shm {

/// Thread-safe after connect().
class LocalPeers {
 public:
  /// Maps the arenas of the other ranks. Every rank of `ranks` (world ranks, ascending, this one included) calls it and
  /// blocks until all have. The arenas are passed over sockets in directories that only this user can enter. Throws
  /// CommError if a rank does not call it before `deadline` or cannot be reached.
  static std::shared_ptr<LocalPeers> connect(job::Store& store, const std::vector<int>& ranks, int rank,
                                             base::Deadline deadline);

  /// The address in this process at which the arena of `rank` begins. For this rank it is Arena::this_process().
  char* arena_of(int rank) const;
  /// Exchanges the addresses of blocks: each of `members` passes a block of `bytes` in its own arena. Returns the
  /// blocks in the order of the members, at their addresses in this process. Blocks until all members have called it.
  /// `store` is used by this call alone. Throws CommError if a member does not call it before `deadline`.
  std::vector<void*> exchange_addresses(job::Store& store, const std::vector<int>& members, const void* own,
                                        std::size_t bytes, base::Deadline deadline) const;
  /// Returns false once the process of `rank` has ended. Makes a system call.
  bool is_alive(int rank) const;
  /// True if this host has more ranks than cores; a waiting rank must then yield instead of spinning.
  bool is_oversubscribed() const { return oversubscribed_; }

 private:
  struct LocalPeer {
    base::Fd socket;  // the peer's end closes when its process, and children that it forked without exec, have ended
    base::SharedMemory arena;
  };
  LocalPeers(std::vector<int> ranks, int rank);
  void exchange_arena(int peer, base::Fd socket, base::Deadline deadline);

  const std::vector<int> ranks_;
  const int rank_;
  bool oversubscribed_ = false;
  std::map<int, LocalPeer> peers_;
};

}  // namespace lockstep::comm::shm
