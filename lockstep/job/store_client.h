// A Store that lives in another process.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// Connects to the StoreServer at `address` as `rank`, trying until the deadline. Throws CommError: kCoordinatorLost
/// when nobody answers, or no longer (kPeerUnreachable when its host is silent), kProtocol when it is no Lockstep store
/// or another version's, kWrongJob and kStaleGen when it belongs to another job, or another start of it, kAuthFailed
/// when the two ends do not have the same key. Later a store whose process stands still, while its host lives, as when
/// a person has stopped it, is waited for until the deadline of each call, and for 10 s at least.
std::shared_ptr<Store> connect_store(const base::Address& address, const Credentials& credentials, int rank,
                                     base::Deadline deadline);

}  // namespace lockstep::job
