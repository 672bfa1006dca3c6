// Serves a LocalStore over TCP. `lockstep run` runs the server; without it, rank 0 does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {

/// Returns how many unauthenticated connections a server for `ranks` ranks keeps: all ranks may connect at once. It
/// drops the excess.
constexpr std::uint64_t max_unauthenticated(int ranks) { return static_cast<std::uint64_t>(std::max(64, ranks)); }
/// Returns the number of descriptors that a server for `ranks` ranks needs: up to five connections per rank, the
/// unauthenticated ones, and 64 that it has just accepted.
constexpr std::uint64_t store_fd_count(int ranks) {
  return 5 * static_cast<std::uint64_t>(ranks) + max_unauthenticated(ranks) + 64;
}

/// Listens on exactly the given address and serves clients (connect_store()) on a thread of its own. A client must
/// prove within 2 s, in at most 256 bytes, that it has the job's key; otherwise the server drops the connection. It
/// checks every later length before it allocates memory. A rejected client receives the reason, and the server logs the
/// first rejection of each kind. If a host becomes unreachable, the server publishes kPeerUnreachable with the ranks of
/// that host as the job's first cause.
class StoreServer {
 public:
  /// Port 0 picks a free port. `ranks` is the number of ranks that may connect at once. Set `publish_rank_exits` if no
  /// launcher monitors the ranks' processes: the server then sets key::exited() of a rank whose last connection has
  /// closed. Throws SystemError, with kPortInUse if the port is taken.
  StoreServer(const base::net::Address& address, Credentials credentials, int ranks = 1,
              bool publish_rank_exits = false);
  /// Closes all connections and joins the thread. Blocks only until the thread has handled its current events.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const base::net::Address& address() const;
  /// Returns the store itself, for use in the server's process. Thread-safe.
  LocalStore& store();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::job
