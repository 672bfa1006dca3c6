#include "lockstep/comm/shm/control_block.h"

#include <new>
#include <stdexcept>
#include <string>

#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {

Boards::Boards(std::shared_ptr<const Neighbours> neighbours, std::vector<int> members, int rank)
    : neighbours_(std::move(neighbours)),
      members_(std::move(members)),
      rank_(rank),
      patience_(neighbours_->crowded() ? Patience::crowded() : Patience::ample()) {
  for (const int member : members_) arenas_.push_back(neighbours_->arena_of(member));
}

std::unique_ptr<Boards> Boards::meet(std::shared_ptr<const Neighbours> neighbours, job::Store& store,
                                     std::vector<int> members, int rank, base::Deadline deadline) {
  std::unique_ptr<Boards> boards(new Boards(std::move(neighbours), std::move(members), rank));
  const std::size_t size = boards->members_.size();
  const std::size_t bytes = sizeof(Board) + size * sizeof(Mailbox);
  auto* own = new (Arena::process().allocate(bytes)) Board();
  for (std::size_t peer = 0; peer < size; ++peer) new (reinterpret_cast<Mailbox*>(own + 1) + peer) Mailbox();
  for (void* board : boards->swap(store, own, bytes, deadline)) boards->boards_.push_back(static_cast<Board*>(board));
  return boards;
}

std::vector<void*> Boards::swap(job::Store& store, const void* own, std::size_t bytes, base::Deadline deadline) const {
  return neighbours_->swap(store, members_, own, bytes, deadline);
}

// The own board stays allocated: a neighbour may look at it once more, for example to see that this rank was done.
Boards::~Boards() = default;

void Boards::advance(Signal& signal, std::uint32_t count) const {
  signal.count.store(count, std::memory_order_seq_cst);
  // Either a sleeper sees the new count before it sleeps, or this sees that it sleeps (Dekker): both orders are
  // sequentially consistent.
  for (const Board* board : boards_)
    if (board->sleeping.count.load(std::memory_order_seq_cst) != 0) return wake(signal);
}

bool Boards::wait(int member, const Signal& signal, std::uint32_t count, base::Deadline deadline) const {
  if (reached(signal, count)) return true;
  if (deadline.expired()) return false;
  if (try_reach(signal, count, patience_)) return true;
  own().sleeping.count.fetch_add(1, std::memory_order_seq_cst);
  const bool came = sleep_until(signal, count, deadline);
  own().sleeping.count.fetch_sub(1, std::memory_order_relaxed);
  if (came) return true;
  const int rank = members_[static_cast<std::size_t>(member)];
  if (neighbours_->alive(rank)) return false;
  // It may have ended after it did its part.
  if (reached(signal, count)) return true;
  throw std::runtime_error("the process of rank " + std::to_string(rank) + " has ended");
}

}  // namespace lockstep::comm
