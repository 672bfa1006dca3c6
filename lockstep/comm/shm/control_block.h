// The control block of a rank in shared memory: its progress in the operations of one channel, and where its data is.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/base/atomic.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/local_peers.h"
#include "lockstep/comm/shm/shared_counter.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::shm {

// The maximum size of the signature of a call that the ranks compare during the operation.
constexpr std::size_t kMaxSignatureBytes = 256;
// Data up to this size is copied into the control block. The ranks then synchronize once instead of twice.
constexpr std::size_t kInlineBytes = 4096;

/// Stored in the arena of its owner, zeroed at first. The owner alone writes it, except for `claims`. The data of
/// operation n is in element n % 2 of each array.
///
/// Memory ordering. The plain members, and the tensor that `offset` refers to, are published by the owner's store to
/// `published[n % 2].count` (ControlBlocks::advance(), sequentially consistent, so also a release). A rank whose
/// acquire load in has_reached() returns n or more reads the values that the owner wrote before that store. In the same
/// way the store to `completed.count` publishes everything that the owner wrote into its own and its peers' memory
/// during operation n. Reuse of an element is safe: a rank that begins operation n has read `published` >= n - 1 from
/// all other ranks, and each of them stored n - 1 only after its last read of the elements of operation n - 2. The
/// ranks change `claims` by relaxed read-modify-write operations, which is enough to give each chunk to one rank; the
/// first member resets it before it publishes. Claims order no data: the counters do.
struct ControlBlock {
  SharedCounter published[2];           // the number of the operation whose data is readable, and the signature's hash
  SharedCounter completed;              // the number of the last operation in which this rank has finished all accesses
  SharedCounter num_sleepers;           // the number of the owner's threads that sleep until a counter advances
  alignas(64) std::uint64_t offset[2];  // of the owner's tensor in its arena
  // The work that has been claimed: a count of chunks or a bit per chunk. All ranks use the first member's.
  alignas(64) base::Atomic<std::uint64_t> claims[2];
  // The signature, if the ranks compare it during the operation, then the data.
  alignas(64) char inline_data[2][kMaxSignatureBytes + kInlineBytes];
};

/// A message to one peer, as an offset in the sender's arena.
struct ShmMessage {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// The owner's side of the messages between it and one peer. Memory ordering: see PeerMessages in shm.cc.
struct MessageSlot {
  SharedCounter sent;              // the number of messages sent to the peer
  SharedCounter received;          // the number of messages from the peer that the owner has read
  alignas(64) ShmMessage message;  // the current message to the peer
};

/// The control blocks of all members of a channel, each in the arena of its owner. Thread-safe after construction.
class ControlBlocks {
 public:
  /// Allocates the control block of this rank and exchanges addresses with the other members, through `store`. Blocks
  /// until all of them have called it. `rank` is the index of this rank in `members`. Throws CommError.
  static std::unique_ptr<ControlBlocks> connect(std::shared_ptr<const LocalPeers> local_peers, job::Store& store,
                                                std::vector<int> members, int rank, base::Deadline deadline);
  ~ControlBlocks();
  ControlBlocks(const ControlBlocks&) = delete;
  ControlBlocks& operator=(const ControlBlocks&) = delete;

  int size() const { return static_cast<int>(control_blocks_.size()); }
  int rank() const { return rank_; }
  ControlBlock& of(int member) const { return *control_blocks_[static_cast<std::size_t>(member)]; }
  ControlBlock& own() const { return of(rank_); }
  /// The slot of `member` for its messages with `peer`. The slots follow the control block in memory.
  MessageSlot& message_slot(int member, int peer) const {
    return reinterpret_cast<MessageSlot*>(&of(member) + 1)[peer];
  }
  arena::Arena& arena() const { return local_peers_->arena(); }
  /// The address in this process at which the arena of `member` begins.
  char* arena_of(int member) const { return arenas_[static_cast<std::size_t>(member)]; }

  /// LocalPeers::exchange_addresses() among the members.
  std::vector<void*> exchange_addresses(job::Store& store, const void* own, std::size_t bytes,
                                        base::Deadline deadline) const;

  /// Sets `counter`, which belongs to this rank's control block, to `count` and wakes the threads that sleep on it.
  /// Publishes all earlier writes of this thread to the ranks that wait for the count.
  void advance(SharedCounter& counter, std::uint32_t count) const;
  /// Spins and then yields until `counter` reaches `count`, as often as the spin policy of this host allows. Does not
  /// sleep. Returns true if the count was reached.
  bool wait_spinning(const SharedCounter& counter, std::uint32_t count) const {
    return spin_until_reached(counter, count, local_peers_->spin_policy());
  }
  /// Blocks until `counter`, which `member` advances, reaches `count`: spins and yields, then sleeps. Returns false at
  /// the deadline, or at once if the deadline has expired. Throws std::runtime_error if the process of `member` has
  /// ended without reaching the count.
  bool wait(int member, const SharedCounter& counter, std::uint32_t count, base::Deadline deadline) const;

 private:
  ControlBlocks(std::shared_ptr<const LocalPeers> local_peers, std::vector<int> members, int rank);

  const std::shared_ptr<const LocalPeers> local_peers_;
  const std::vector<int> members_;  // world ranks
  const int rank_;                  // index in members_
  std::vector<ControlBlock*> control_blocks_;
  std::vector<char*> arenas_;
};

}  // namespace lockstep::comm::shm
