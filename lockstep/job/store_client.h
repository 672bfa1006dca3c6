// A client of a StoreServer in another process.
#pragma once

#include <memory>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// Connects to the StoreServer at `address` as `rank`, retrying until the deadline. Throws CommError: kCoordinatorLost
/// if no server answers (kPeerUnreachable if its host is unreachable), kProtocol if the peer is not a Lockstep store or
/// has another version, kWrongJob or kStaleGen if it belongs to another job or to another generation of this job,
/// kAuthFailed if the two ends have different keys.
///
/// The returned store is thread-safe. Once the server is lost, every method throws kCoordinatorLost, or
/// kPeerUnreachable if the server's host is unreachable. If the server's process is suspended (a user has stopped it)
/// while its host is up, each call waits for it until the call's deadline, but at least 10 s; it then throws
/// kCoordinatorLost, and later calls try again.
std::shared_ptr<Store> connect_store(const base::net::Address& address, const Credentials& credentials, int rank,
                                     base::Deadline deadline);

}  // namespace lockstep::job
