// What a rank shows to the others of one channel: how far it has come, and where its data lies.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/local_peers.h"
#include "lockstep/comm/shm/shared_counter.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

constexpr std::size_t kCallBytes = 256;     // of a call that is compared
constexpr std::size_t kInlineBytes = 4096;  // what fits goes through the board, with one meeting instead of two

/// In shared memory, written by its owner alone but for `claims`. What belongs to operation n is in element n % 2:
/// whoever begins operation n has seen all others begin n - 1, so that nobody reads what belongs to n - 2 any more.
struct ControlBlock {
  SharedCounter published[2];                        // the operation whose data is shown, and the key of its call
  SharedCounter completed;                           // the operation of which this rank has read and written everything
  SharedCounter num_sleepers;                        // how many of the owner's threads sleep on somebody's signal
  alignas(64) std::uint64_t offset[2];               // of the owner's tensor in its arena
  alignas(64) std::atomic<std::uint64_t> claims[2];  // the next piece of work, of the first member's board; any rank
  alignas(64) char inline_data[2][kCallBytes + kInlineBytes];  // the call, if it is compared on the way, then the data
};

/// A message to one peer: where it lies in the sender's arena.
struct ShmMessage {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// Messages between the owner of a board and one peer, in both directions.
struct MessageSlot {
  SharedCounter sent;              // letters to the peer
  SharedCounter received;          // letters from the peer that have been read
  alignas(64) ShmMessage message;  // to the peer; the next comes when this one has been taken
};

/// The boards of all members of a channel, each in its owner's arena.
class ControlBlocks {
 public:
  /// Waits for the others to show theirs. Throws CommError.
  static std::unique_ptr<ControlBlocks> connect(std::shared_ptr<const LocalPeers> neighbours, job::Store& store,
                                                std::vector<int> members, int rank, base::Deadline deadline);
  ~ControlBlocks();
  ControlBlocks(const ControlBlocks&) = delete;
  ControlBlocks& operator=(const ControlBlocks&) = delete;

  int size() const { return static_cast<int>(control_blocks_.size()); }
  int rank() const { return rank_; }
  ControlBlock& of(int member) const { return *control_blocks_[static_cast<std::size_t>(member)]; }
  ControlBlock& own() const { return of(rank_); }
  /// The mailbox of `member` for its messages with `peer`; they follow its board.
  MessageSlot& message_slot(int member, int peer) const {
    return reinterpret_cast<MessageSlot*>(&of(member) + 1)[peer];
  }
  char* arena_of(int member) const { return arenas_[static_cast<std::size_t>(member)]; }

  /// LocalPeers::swap() among the members.
  std::vector<void*> exchange_addresses(job::Store& store, const void* own, std::size_t bytes,
                                        base::Deadline deadline) const;

  /// Advances `signal`, which is of the own board, and wakes those who sleep.
  void advance(SharedCounter& counter, std::uint32_t count) const;
  /// Spins and yields until the signal, which `member` advances, is there or patience ends. Whether it is.
  bool wait_spinning(const SharedCounter& counter, std::uint32_t count) const {
    return spin_until_reached(counter, count, spin_policy_);
  }
  /// Waits for a signal that `member` advances: spins and yields, then sleeps. False at the deadline; one that is over
  /// only looks. Throws when the process of `member` has ended before it came so far.
  bool wait(int member, const SharedCounter& counter, std::uint32_t count, base::Deadline deadline) const;

 private:
  ControlBlocks(std::shared_ptr<const LocalPeers> neighbours, std::vector<int> members, int rank);

  const std::shared_ptr<const LocalPeers> local_peers_;
  const std::vector<int> members_;  // world ranks
  const int rank_;                  // here
  const SpinPolicy spin_policy_;
  std::vector<ControlBlock*> control_blocks_;
  std::vector<char*> arenas_;
};

}  // namespace lockstep::comm
