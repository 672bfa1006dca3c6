#include "lockstep/comm/shm/board.h"

#include <new>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {

Boards::Boards(std::shared_ptr<const Neighbours> neighbours, std::vector<int> members, int rank)
    : neighbours_(std::move(neighbours)), members_(std::move(members)), rank_(rank),
      patience_(neighbours_->crowded() ? Patience::crowded() : Patience::ample()) {}

std::unique_ptr<Boards> Boards::meet(std::shared_ptr<const Neighbours> neighbours, job::Store& store, std::vector<int> members, int rank,
                                     base::Deadline deadline) {
  std::unique_ptr<Boards> boards(new Boards(std::move(neighbours), std::move(members), rank));
  Arena& arena = Arena::process();
  const std::size_t size = boards->members_.size();
  auto* own = new (arena.allocate(sizeof(Board) + size * sizeof(Mailbox))) Board();
  for (std::size_t peer = 0; peer < size; ++peer) new (reinterpret_cast<Mailbox*>(own + 1) + peer) Mailbox();
  store.set(std::to_string(rank), std::to_string(arena.offset_of(own)), deadline);
  for (std::size_t member = 0; member < boards->members_.size(); ++member) {
    boards->arenas_.push_back(boards->neighbours_->arena_of(boards->members_[member]));
    if (static_cast<int>(member) == rank) {
      boards->boards_.push_back(own);
      continue;
    }
    const auto text = store.get(std::to_string(member), deadline);
    const auto offset = text ? base::parse_int(*text) : std::nullopt;
    if (!offset) {
      const int peer = boards->members_[member];
      throw base::CommError(base::Cause::kJoinTimeout, "connect", boards->members_[static_cast<std::size_t>(rank)], peer,
                            "rank " + std::to_string(peer) + " did not come to a new group in time");
    }
    boards->boards_.push_back(reinterpret_cast<Board*>(boards->arenas_.back() + *offset));
  }
  return boards;
}

// The own board stays allocated: a neighbour may look at it once more, for example to see that this rank was done.
Boards::~Boards() = default;

void Boards::advance(Signal& signal, std::uint32_t count) const {
  signal.count.store(count, std::memory_order_seq_cst);
  // Either a sleeper sees the new count before it sleeps, or this sees that it sleeps (Dekker): both orders are sequentially consistent.
  for (const Board* board : boards_)
    if (board->sleeping.count.load(std::memory_order_seq_cst) != 0) return wake(signal);
}

bool Boards::wait(const Signal& signal, std::uint32_t count, base::Deadline deadline) const {
  if (try_reach(signal, count, patience_)) return true;
  own().sleeping.count.fetch_add(1, std::memory_order_seq_cst);
  const bool came = sleep_until(signal, count, deadline);
  own().sleeping.count.fetch_sub(1, std::memory_order_relaxed);
  return came;
}

}  // namespace lockstep::comm
