#include "lockstep/comm/shm/control_block.h"

#include <new>
#include <stdexcept>
#include <string>

namespace lockstep::comm::shm {

ControlBlocks::ControlBlocks(std::shared_ptr<const LocalPeers> local_peers, std::vector<int> members, int rank)
    : local_peers_(std::move(local_peers)), members_(std::move(members)), rank_(rank) {
  for (const int member : members_) arenas_.push_back(local_peers_->arena_of(member));
}

std::unique_ptr<ControlBlocks> ControlBlocks::connect(std::shared_ptr<const LocalPeers> local_peers, job::Store& store,
                                                      std::vector<int> members, int rank, base::Deadline deadline) {
  std::unique_ptr<ControlBlocks> control_blocks(new ControlBlocks(std::move(local_peers), std::move(members), rank));
  const std::size_t size = control_blocks->members_.size();
  const std::size_t bytes = sizeof(ControlBlock) + size * sizeof(MessageSlot);
  auto* own = new (control_blocks->arena().allocate(bytes)) ControlBlock();
  for (std::size_t peer = 0; peer < size; ++peer) new (reinterpret_cast<MessageSlot*>(own + 1) + peer) MessageSlot();
  for (void* control_block : control_blocks->exchange_addresses(store, own, bytes, deadline))
    control_blocks->control_blocks_.push_back(static_cast<ControlBlock*>(control_block));
  return control_blocks;
}

std::vector<void*> ControlBlocks::exchange_addresses(job::Store& store, const void* own, std::size_t bytes,
                                                     base::Deadline deadline) const {
  return local_peers_->exchange_addresses(store, members_, own, bytes, deadline);
}

// This rank's control block is never freed: a peer may still read it, for example to check whether this rank has
// completed.
ControlBlocks::~ControlBlocks() = default;

void ControlBlocks::advance(SharedCounter& counter, std::uint32_t count) const {
  counter.count.store(count, std::memory_order_seq_cst);
  // Dekker's pattern: the waiter increments num_sleepers and then reads the count, this thread stores the count and
  // then reads num_sleepers. All four accesses are sequentially consistent, so either the waiter reads the new count
  // before it sleeps, or this thread reads that it sleeps.
  for (const ControlBlock* control_block : control_blocks_)
    if (control_block->num_sleepers.count.load(std::memory_order_seq_cst) != 0)
      return base::futex_wake_all(counter.count);
}

bool ControlBlocks::wait(int member, const SharedCounter& counter, std::uint32_t count, base::Deadline deadline) const {
  if (has_reached(counter, count)) return true;
  if (deadline.expired()) return false;
  if (wait_spinning(counter, count)) return true;
  own().num_sleepers.count.fetch_add(1, std::memory_order_seq_cst);
  const bool reached = block_until_reached(counter, count, deadline);
  own().num_sleepers.count.fetch_sub(1, std::memory_order_relaxed);
  if (reached) return true;
  const int rank = members_[static_cast<std::size_t>(member)];
  if (local_peers_->is_alive(rank)) return false;
  // The process may have ended after it advanced the counter.
  if (has_reached(counter, count)) return true;
  throw std::runtime_error("the process of rank " + std::to_string(rank) + " has ended");
}

}  // namespace lockstep::comm::shm
