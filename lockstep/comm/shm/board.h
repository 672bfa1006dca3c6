// What a rank shows to the others of one channel: how far it has come, and where its data lies.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/neighbours.h"
#include "lockstep/comm/shm/signal.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

constexpr std::size_t kSlotBytes = 4096;  // what fits goes through the board, with one meeting instead of two

/// Where a rank's tensors of one operation lie in its arena; 0 is none (the arena's first page is never a tensor's).
struct Placement {
  std::uint64_t input = 0;
  std::uint64_t output = 0;
};

/// In shared memory, written by its owner alone but for `claims`. What belongs to operation n is in element n % 2: whoever begins
/// operation n has seen all others begin n - 1, so that nobody reads what belongs to n - 2 any more.
struct Board {
  Signal arrived;   // the operation whose data is shown
  Signal done;      // the operation of which this rank has read and written everything
  Signal sleeping;  // how many of the owner's threads sleep on somebody's signal
  alignas(64) Placement placement[2];
  alignas(64) std::atomic<std::uint64_t> claims[2];  // the next piece of work, of the first member's board; any rank
  alignas(64) char slot[2][kSlotBytes];
};

/// A message to one peer: where it lies in the sender's arena.
struct Letter {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// Messages between the owner of a board and one peer, in both directions.
struct Mailbox {
  Signal sent;   // letters to the peer
  Signal taken;  // letters from the peer that have been read
  alignas(64) Letter letter;  // to the peer; the next comes when this one has been taken
};

/// The boards of all members of a channel, each in its owner's arena.
class Boards {
 public:
  /// Waits for the others to show theirs. Throws CommError.
  static std::unique_ptr<Boards> meet(std::shared_ptr<const Neighbours> neighbours, job::Store& store, std::vector<int> members, int rank,
                                      base::Deadline deadline);
  ~Boards();
  Boards(const Boards&) = delete;
  Boards& operator=(const Boards&) = delete;

  int size() const { return static_cast<int>(boards_.size()); }
  int rank() const { return rank_; }
  Board& of(int member) const { return *boards_[static_cast<std::size_t>(member)]; }
  Board& own() const { return of(rank_); }
  /// The mailbox of `member` for its messages with `peer`; they follow its board.
  Mailbox& mailbox(int member, int peer) const { return reinterpret_cast<Mailbox*>(&of(member) + 1)[peer]; }
  char* arena_of(int member) const { return arenas_[static_cast<std::size_t>(member)]; }
  bool alive(int member) const { return neighbours_->alive(members_[static_cast<std::size_t>(member)]); }

  /// Advances `signal`, which is of the own board, and wakes those who sleep.
  void advance(Signal& signal, std::uint32_t count) const;
  /// Waits a moment for another's signal: spins and yields, then sleeps till `deadline`. Whether it was reached.
  bool wait(const Signal& signal, std::uint32_t count, base::Deadline deadline) const;

 private:
  Boards(std::shared_ptr<const Neighbours> neighbours, std::vector<int> members, int rank);

  const std::shared_ptr<const Neighbours> neighbours_;
  const std::vector<int> members_;  // world ranks
  const int rank_;                  // here
  const Patience patience_;
  std::vector<Board*> boards_;
  std::vector<char*> arenas_;
};

}  // namespace lockstep::comm
