#include "lockstep/comm/shm/local_peers.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "lockstep/base/check.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/unix_socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;

std::string socket_key(int rank) { return "shm/socket/" + std::to_string(rank); }

/// The label of a descriptor is the size of the arena plus the index of its owner among the ranks of the host. Sizes
/// are multiples of the page size, so the low 12 bits are free for the index.
constexpr std::uint64_t kIndexMask = 4095;

std::string socket_path_of(job::Store& store, int rank, int own_rank, Deadline deadline) {
  const auto path = store.get(socket_key(rank), deadline);
  if (!path)
    throw base::CommError(base::Cause::kJoinTimeout, "init", own_rank, rank,
                          "rank " + std::to_string(rank) + " of this host did not offer its shared memory in time");
  return *path;
}

}  // namespace

LocalPeers::LocalPeers(std::vector<int> ranks, int rank) : ranks_(std::move(ranks)), rank_(rank) {
  oversubscribed_ = static_cast<long>(ranks_.size()) > ::sysconf(_SC_NPROCESSORS_ONLN);
}

std::shared_ptr<LocalPeers> LocalPeers::connect(job::Store& store, const std::vector<int>& ranks, int rank,
                                                Deadline deadline) {
  const std::shared_ptr<LocalPeers> all(new LocalPeers(ranks, rank));
  try {
    base::net::UnixListener listener(base::Env::this_process().tmpdir.value_or("/tmp"));
    store.set(socket_key(rank), listener.path(), deadline);
    // Each rank connects to the lower ranks and then accepts the higher ones, so there is no circular wait.
    for (const int peer : ranks)
      if (peer < rank)
        all->exchange_arena(peer, base::net::connect_unix(socket_path_of(store, peer, rank, deadline)), deadline);
    const auto later = std::count_if(ranks.begin(), ranks.end(), [rank](int peer) { return peer > rank; });
    for (std::ptrdiff_t i = 0; i < later; ++i) all->exchange_arena(-1, listener.accept(deadline), deadline);
  } catch (const base::SystemError& error) {
    throw base::CommError(error.cause(), "init", rank, -1,
                          std::string("cannot share memory with the other ranks of this host: ") + error.what(),
                          "use --transport gloo, which needs no shared memory");
  }
  return all;
}

void LocalPeers::exchange_arena(int peer, base::Fd socket, Deadline deadline) {
  const base::SharedMemory& mine = arena::Arena::this_process().memory();
  const auto index = std::find(ranks_.begin(), ranks_.end(), rank_) - ranks_.begin();
  LOCKSTEP_CHECK(index <= static_cast<std::ptrdiff_t>(kIndexMask));
  base::net::send_fd(socket.get(), mine.size() | static_cast<std::uint64_t>(index), mine.fd().get());
  base::net::FdMessage theirs = base::net::receive_fd(socket.get(), deadline);
  const std::size_t peer_index = theirs.label & kIndexMask;
  const int peer_rank = peer_index < ranks_.size() ? ranks_[peer_index] : -1;
  if (peer_rank < 0 || peer_rank == rank_ || (peer >= 0 && peer_rank != peer) || peers_.contains(peer_rank))
    throw base::SystemError(
        "an unexpected process connected, as number " + std::to_string(peer_index) + " of this host's ranks", EPROTO);
  peers_[peer_rank] = {std::move(socket), base::SharedMemory::map(std::move(theirs.fd), theirs.label & ~kIndexMask)};
}

std::vector<void*> LocalPeers::exchange_addresses(job::Store& store, const std::vector<int>& members, const void* own,
                                                  std::size_t bytes, Deadline deadline) const {
  arena::Arena& arena = arena::Arena::this_process();
  store.set(std::to_string(rank_), std::to_string(arena.offset_of(own)), deadline);
  std::vector<void*> blocks;
  for (const int member : members) {
    const auto text = store.get(std::to_string(member), deadline);
    if (!text)
      throw base::CommError(base::Cause::kJoinTimeout, "connect", rank_, member,
                            "rank " + std::to_string(member) + " did not join a new group in time");
    const auto end =
        static_cast<std::int64_t>((member == rank_ ? arena.memory() : peers_.at(member).arena).size() - bytes);
    blocks.push_back(arena_of(member) + base::parse_int_in_range("the offset in shared memory", *text, 0, end));
  }
  return blocks;
}

char* LocalPeers::arena_of(int rank) const {
  if (rank == rank_) return arena::Arena::this_process().memory().data();
  const auto found = peers_.find(rank);
  LOCKSTEP_CHECK(found != peers_.end());
  return found->second.arena.data();
}

bool LocalPeers::is_alive(int rank) const {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) return true;
  pollfd entry{found->second.socket.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;  // the peer never writes, so a readable socket means that it was closed
}

}  // namespace lockstep::comm::shm
