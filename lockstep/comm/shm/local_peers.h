// The other ranks of this host and the mappings of their arenas in this process.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/shared_counter.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::shm {

/// What a rank has of another rank of its host.
struct LocalPeer {
  base::Fd socket;  // the peer's end closes when its process, and children that it forked without exec, have ended
  std::shared_ptr<const base::SharedMemory> arena;
};

/// Thread-safe after connect().
class LocalPeers {
 public:
  /// `arena` is this rank's and must outlive the object; `peers` are the other ranks. `ranks` are the world ranks of
  /// the host, ascending. Tests, whose ranks are threads, use it to pass one arena to all ranks; others use connect().
  LocalPeers(arena::Arena& arena, std::vector<int> ranks, int rank, std::map<int, LocalPeer> peers,
             SpinPolicy spin_policy);

  /// Maps the arenas of the other ranks and passes `arena` to them. Every rank of `ranks` (world ranks, ascending, this
  /// one included) calls it and blocks until all have. The arenas are passed over sockets without files, with random
  /// names that the store has, between processes of this user. Throws CommError if a rank does not call it before
  /// `deadline` or cannot be reached.
  static std::shared_ptr<LocalPeers> connect(arena::Arena& arena, job::Store& store, const std::vector<int>& ranks,
                                             int rank, base::Deadline deadline);

  arena::Arena& arena() const { return arena_; }
  /// The address in this process at which the arena of `rank` begins.
  char* arena_of(int rank) const { return memory_of(rank).data(); }
  /// Exchanges the addresses of blocks: each of `members` passes a block of `bytes` in its own arena. Returns the
  /// blocks in the order of the members, at their addresses in this process. Blocks until all members have called it.
  /// `store` is used by this call alone. Throws CommError if a member does not call it before `deadline`.
  std::vector<void*> exchange_addresses(job::Store& store, const std::vector<int>& members, const void* own,
                                        std::size_t bytes, base::Deadline deadline) const;
  /// Returns false once the process of `rank` has ended. Makes a system call.
  bool is_alive(int rank) const;
  /// How long the ranks of this host poll before they sleep.
  SpinPolicy spin_policy() const { return spin_policy_; }

 private:
  void exchange_arena(int peer, base::Fd socket, base::Deadline deadline);
  const base::SharedMemory& memory_of(int rank) const;

  arena::Arena& arena_;
  const std::vector<int> ranks_;
  const int rank_;
  const SpinPolicy spin_policy_;
  std::map<int, LocalPeer> peers_;
};

}  // namespace lockstep::comm::shm
