// Serves a LocalStore over TCP. The launcher runs the server, or rank 0 if there is no launcher.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {

/// Returns the number of descriptors that a server for `ranks` ranks needs: up to five connections per rank, and 128
/// for unauthenticated connections, of which the server drops the excess.
constexpr std::uint64_t store_fd_count(int ranks) { return 5 * static_cast<std::uint64_t>(ranks) + 128; }

/// Listens on exactly the given address and answers StoreClient on a thread of its own. A connection must prove within
/// 2 s and 256 bytes that it has the job's key; otherwise the server drops it without allocating memory for it. Every
/// later length is checked before memory is allocated. A rejected client receives the reason, and the first rejection
/// of each kind is logged. If a host becomes unreachable, the server publishes kPeerUnreachable with the ranks of that
/// host as the job's first cause.
class StoreServer {
 public:
  /// Port 0 picks a free port. Set `publish_rank_exits` if no launcher observes the ranks' processes: the server then
  /// sets key::exited() for a rank whose last connection has closed. Throws SystemError, with kPortInUse if the port is
  /// taken.
  StoreServer(const base::Address& address, Credentials credentials, bool publish_rank_exits = false);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Returns the address on which the server listens.
  const base::Address& address() const;
  /// Returns the store itself, for use in the server's process. Thread-safe.
  LocalStore& store();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::job
