#include "lockstep/comm/shm/neighbours.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/check.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/handover.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

std::string door_key(int rank) { return "shm/door/" + std::to_string(rank); }

/// The memory's size and the rank that it belongs to, in one number: sizes are whole pages.
std::uint64_t label_of(std::size_t size, int rank) { return static_cast<std::uint64_t>(size) | static_cast<std::uint64_t>(rank); }
constexpr std::uint64_t kRankMask = 4095;

std::string path_of(job::Store& store, int rank, int here, Deadline deadline) {
  const auto path = store.get(door_key(rank), deadline);
  if (!path)
    throw base::CommError(base::Cause::kJoinTimeout, "init", here, rank,
                          "rank " + std::to_string(rank) + " of this host did not offer its shared memory in time");
  return *path;
}

}  // namespace

Neighbours::Neighbours(std::vector<int> ranks, int rank) : ranks_(std::move(ranks)), rank_(rank) {
  crowded_ = static_cast<long>(ranks_.size()) > ::sysconf(_SC_NPROCESSORS_ONLN);
}

std::shared_ptr<Neighbours> Neighbours::meet(job::Store& store, const std::vector<int>& ranks, int rank, Deadline deadline) {
  const std::shared_ptr<Neighbours> all(new Neighbours(ranks, rank));
  try {
    base::PrivateDoor door(base::Env::process().tmpdir.value_or("/tmp"));
    store.set(door_key(rank), door.path(), deadline);
    // Each knocks at those before it, then opens to those after it: nobody waits in a circle.
    for (const int peer : ranks)
      if (peer < rank) all->exchange(peer, base::knock(path_of(store, peer, rank, deadline)), deadline);
    const auto later = std::count_if(ranks.begin(), ranks.end(), [rank](int peer) { return peer > rank; });
    for (std::ptrdiff_t i = 0; i < later; ++i) all->exchange(-1, door.accept(deadline), deadline);
  } catch (const base::SystemError& error) {
    throw base::CommError(error.cause(), "init", rank, -1, std::string("shared memory with the other ranks of this host: ") + error.what(),
                          "--transport gloo does without shared memory");
  }
  return all;
}

void Neighbours::exchange(int peer, base::Fd door, Deadline deadline) {
  const base::SharedMemory& mine = Arena::process().memory();
  base::send_parcel(door.get(), label_of(mine.size(), rank_), mine.fd().get());
  base::Parcel theirs = base::receive_parcel(door.get(), deadline);
  const int number = static_cast<int>(theirs.label & kRankMask);
  if ((peer >= 0 && number != peer) || others_.contains(number) || std::find(ranks_.begin(), ranks_.end(), number) == ranks_.end())
    throw base::SystemError("a process that calls itself rank " + std::to_string(number) + " came instead of another", EPROTO);
  others_[number] = {std::move(door), base::SharedMemory::map(std::move(theirs.fd), theirs.label & ~kRankMask)};
}

char* Neighbours::arena_of(int rank) const {
  if (rank == rank_) return Arena::process().memory().data();
  const auto found = others_.find(rank);
  LOCKSTEP_CHECK(found != others_.end());
  return found->second.arena.data();
}

bool Neighbours::alive(int rank) const {
  const auto found = others_.find(rank);
  if (found == others_.end()) return true;
  pollfd entry{found->second.door.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;  // nobody ever writes: what can be read is the end
}

}  // namespace lockstep::comm
