#include "lockstep/comm/shm/local_peers.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/net/unix_socket.h"
#include "lockstep/base/parse.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;

std::string socket_key(int rank) { return "shm/socket/" + std::to_string(rank); }

/// The label of a descriptor is the size of the arena plus the index of its owner among the ranks of the host. Sizes
/// are multiples of the page size, so the low 12 bits are free for the index.
constexpr std::uint64_t kIndexMask = 4095;

std::string socket_name_of(job::Store& store, int rank, int own_rank, Deadline deadline) {
  const auto name = store.get(socket_key(rank), deadline);
  if (!name)
    throw base::CommError(base::Cause::kJoinTimeout, "init", own_rank, rank,
                          "rank " + std::to_string(rank) + " of this host did not offer its shared memory in time");
  return *name;
}

/// Whether a connection to another process of this host failed because that has ended.
bool is_end_of_process(const base::SystemError& error) {
  const int number = error.error_number();
  return number == ECONNRESET || number == EPIPE || number == ECONNREFUSED;
}

[[noreturn]] void throw_peer_lost(int rank, int peer) {
  throw base::PeerLostError(base::Cause::kPeerUnreachable, "init", rank, peer,
                            "init: " + (peer < 0 ? "another rank" : "rank " + std::to_string(peer)) +
                                " of this host ended before all ranks had joined");
}

}  // namespace

LocalPeers::LocalPeers(arena::Arena& arena, std::vector<int> ranks, int rank, std::map<int, LocalPeer> peers,
                       SpinPolicy spin_policy)
    : arena_(arena), ranks_(std::move(ranks)), rank_(rank), spin_policy_(spin_policy), peers_(std::move(peers)) {}

std::shared_ptr<LocalPeers> LocalPeers::connect(arena::Arena& arena, job::Store& store, const std::vector<int>& ranks,
                                                int rank, Deadline deadline) {
  const bool shares_cores = static_cast<long>(ranks.size()) > ::sysconf(_SC_NPROCESSORS_ONLN);
  const auto all =
      std::make_shared<LocalPeers>(arena, ranks, rank, std::map<int, LocalPeer>(),
                                   shares_cores ? SpinPolicy::for_shared_cores() : SpinPolicy::for_dedicated_cores());
  try {
    const base::net::AbstractListener listener("lockstep-rank-");
    store.set(socket_key(rank), listener.name(), deadline);
    // Each rank connects to the lower ranks and then accepts the higher ones, so there is no circular wait.
    for (const int peer : ranks) {
      if (peer >= rank) continue;
      const std::string name = socket_name_of(store, peer, rank, deadline);
      try {
        all->exchange_arena(peer, base::net::connect_abstract(name), deadline);
      } catch (const base::SystemError& error) {
        if (is_end_of_process(error)) throw_peer_lost(rank, peer);
        throw;
      }
    }
    const auto later = std::count_if(ranks.begin(), ranks.end(), [rank](int peer) { return peer > rank; });
    for (std::ptrdiff_t i = 0; i < later; ++i) all->exchange_arena(-1, listener.accept(deadline), deadline);
  } catch (const base::SystemError& error) {
    if (is_end_of_process(error)) throw_peer_lost(rank, -1);
    throw base::CommError(error.cause(), "init", rank, -1,
                          std::string("cannot share memory with the other ranks of this host: ") + error.what(),
                          "use --transport tcp, which needs no shared memory");
  }
  return all;
}

void LocalPeers::exchange_arena(int peer, base::Fd socket, Deadline deadline) {
  const base::SharedMemory& mine = arena_.memory();
  const auto index = std::find(ranks_.begin(), ranks_.end(), rank_) - ranks_.begin();
  LOCKSTEP_CHECK(index <= static_cast<std::ptrdiff_t>(kIndexMask));
  base::net::send_fd(socket.get(), mine.size() | static_cast<std::uint64_t>(index), mine.fd().get());
  base::net::FdMessage theirs = base::net::receive_fd(socket.get(), deadline);
  const std::size_t peer_index = theirs.label & kIndexMask;
  const int peer_rank = peer_index < ranks_.size() ? ranks_[peer_index] : -1;
  if (peer_rank < 0 || peer_rank == rank_ || (peer >= 0 && peer_rank != peer) || peers_.contains(peer_rank))
    throw base::SystemError(
        "an unexpected process connected, as number " + std::to_string(peer_index) + " of this host's ranks", EPROTO);
  peers_[peer_rank] = {std::move(socket), std::make_shared<base::SharedMemory>(base::SharedMemory::map(
                                              std::move(theirs.fd), theirs.label & ~kIndexMask))};
}

std::vector<void*> LocalPeers::exchange_addresses(job::Store& store, const std::vector<int>& members, const void* own,
                                                  std::size_t bytes, Deadline deadline) const {
  store.set(std::to_string(rank_), std::to_string(arena_.offset_of(own)), deadline);
  std::vector<void*> blocks;
  for (const int member : members) {
    const auto text = store.get(std::to_string(member), deadline);
    if (!text)
      throw base::CommError(base::Cause::kJoinTimeout, "connect", rank_, member,
                            "rank " + std::to_string(member) + " did not join a new group in time");
    const base::SharedMemory& memory = memory_of(member);
    const auto end = static_cast<std::int64_t>(memory.size() - bytes);
    blocks.push_back(memory.data() + base::parse_int_in_range("the offset in shared memory", *text, 0, end));
  }
  return blocks;
}

const base::SharedMemory& LocalPeers::memory_of(int rank) const {
  if (rank == rank_) return arena_.memory();
  const auto found = peers_.find(rank);
  LOCKSTEP_CHECK(found != peers_.end());
  return *found->second.arena;
}

bool LocalPeers::is_alive(int rank) const {
  const auto found = peers_.find(rank);
  if (found == peers_.end()) return true;
  pollfd entry{found->second.socket.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;  // the peer never writes, so a readable socket means that it was closed
}

}  // namespace lockstep::comm::shm
