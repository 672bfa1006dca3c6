// A Store that lives in another process.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/socket.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// Connects to the StoreServer at `address`, trying until the deadline. Throws CommError: kCoordinatorLost when nobody
/// answers, kProtocol when it is no Lockstep store or another version's, kBadArg when it belongs to another job.
std::shared_ptr<Store> connect_store(const base::Address& address, const std::string& job, base::Deadline deadline);

}  // namespace lockstep::job
