// Serves a LocalStore over TCP. The launcher owns one; without a launcher rank 0 does.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {

/// Descriptors that a process needs to serve `ranks`: of each up to five connections, and beside them strangers, whom
/// the server drops.
constexpr std::uint64_t store_fd_count(int ranks) { return 5 * static_cast<std::uint64_t>(ranks) + 128; }

/// Listens on exactly the address it is given and answers StoreClient. A connection must prove within 2 s and 256 bytes
/// that it has the job's key, or it is dropped and nothing is allocated for it; every later length is checked before
/// memory is taken. Who is turned away is told why, and so is, once of each kind, whoever reads this process's log.
/// When the host of ranks falls silent, that they cannot be reached becomes the job's first cause. One own thread.
class StoreServer {
 public:
  /// Throws SystemError (kPortInUse when the port is taken). Port 0 picks one. `publish_rank_exits`: nobody else sees a
  /// rank's process end, so a rank whose last connection was closed gets key::exited().
  StoreServer(const base::Address& address, Credentials credentials, bool publish_rank_exits = false);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Where it listens.
  const base::Address& address() const;
  /// The table itself, for its owner.
  LocalStore& store();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::job
